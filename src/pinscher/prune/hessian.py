"""Pruning a matrix by its inputs: which weights go, and how the others compensate for them. Pure functions.

Optimal Brain Surgeon: with the change of the loss ½ δᵀHδ and the constraint w_q + δ_q = 0, weight q has the cost and
the compensation

    ρ_q = w_q² / (2 [H⁻¹]_qq)          δ = - w_q / [H⁻¹]_qq · H⁻¹ e_q

For one output row of a layer Y = X Wᵀ the squared error of the outputs has H = XᵀX, the same for all rows (SparseGPT).
Wanda is the same with only the diagonal of H and without δ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# What is kept of a matrix: a number of weights, N of each M neighbours of a row, or where a mask [out, in] is True.
Keep = int | tuple[int, int] | Tensor


def shares(keep: int, parts: Sequence[int]) -> list[int]:
    """Distributes `keep` over parts in proportion to their sizes, rounding the running total: the sum is exact."""
    total, seen, before, dealt = sum(parts), 0, 0, []
    for size in parts:
        seen += size
        upto = math.floor(keep * seen / total + 0.5)
        dealt.append(upto - before)
        before = upto
    return dealt


def lowest(scores: Tensor, count: int) -> Tensor:
    """True at the `count` lowest of all scores; of equal ones the last, as everywhere."""
    order = scores.reshape(-1).flip(0).argsort(stable=True)[:count]
    chosen = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    chosen[scores.numel() - 1 - order] = True
    return chosen.view(scores.shape)


def places(scores: Tensor) -> Tensor:
    """The rank of every score along the last dimension, 0 for the largest; equal ones keep their order."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    counted = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, counted)


def not_best(scores: Tensor, n: int, m: int) -> Tensor:
    """True at all but the n largest of every m neighbours of a row."""
    return (places(scores.reshape(len(scores), -1, m)) >= n).view(scores.shape)


def wanda_scores(weight: Tensor, squares: Tensor) -> Tensor:
    """|W_ij| · ‖X_j‖₂, given ‖X_j‖₂²."""
    return weight.abs() * squares.sqrt().to(weight.dtype)


def wanda(weight: Tensor, squares: Tensor, keep: Keep, barred: Tensor | None = None) -> Tensor:
    """The mask (True is pruned) of Wanda (Sun et al. 2023): scores |W_ij| · ‖X_j‖₂ compared within each output row i.

    Args:
        weight: [out, in].
        squares: [in], the sum of squares of each input feature over all tokens: ‖X_j‖₂².
        keep: what is kept. Of a number of weights every row keeps keep / out, with the running total rounded.
        barred: True where a weight may not stay.
    """
    if isinstance(keep, Tensor):
        return ~keep
    scores = wanda_scores(weight, squares)
    if barred is not None:
        scores = scores.masked_fill(barred, -1.0)
    if isinstance(keep, tuple):
        return not_best(scores, *keep)
    rows, columns = weight.shape
    kept = torch.tensor(shares(keep, [columns] * rows), device=weight.device)
    return places(scores) >= kept[:, None]


def _inverse(hessian: Tensor, damping: float) -> Tensor:
    """H⁻¹ in float64, with damping · mean(diag H) added to the diagonal of H."""
    hessian = hessian.double().clone()
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1.0  # a feature that was never active: its weights do not affect the outputs
    diagonal += damping * float(diagonal[~dead].mean() if not dead.all() else 1.0)
    return torch.cholesky_inverse(torch.linalg.cholesky(hessian))


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor U of H⁻¹ (H⁻¹ = UᵀU), with damping · mean(diag H) added to the diagonal of H.

    U_jj² = [(H_j:,j:)⁻¹]_00 and U_j,j: / U_jj is the first row of that inverse divided by its first entry: all that
    pruning column by column from the left needs, with columns that are done left out of H.
    """
    factor: Tensor = torch.linalg.cholesky(_inverse(hessian, damping), upper=True)
    return factor


def surgeon_scores(weight: Tensor, hessian: Tensor, damping: float = 0.01) -> Tensor:
    """w² / [H⁻¹]_jj, the error of the outputs if this weight is pruned and all others of its row compensate.

    A weight of a feature that was never active costs nothing: 0, and not less, because scores are summed over units,
    and the sum should not depend on how many such features a unit has.
    """
    scores = weight.square() / _inverse(hessian, damping).diagonal().to(weight.dtype)
    return scores.masked_fill_(hessian.diagonal() == 0, 0.0)


def sparsegpt_(
    weight: Tensor, hessian: Tensor, keep: Keep, damping: float = 0.01, block: int = 128, barred: Tensor | None = None
) -> Tensor:
    """SparseGPT (Frantar & Alistarh 2023): prunes a matrix in place and returns the mask (True is pruned).

    Columns are walked from left to right. At the start of each `block` of columns the mask of the block is chosen: the
    lowest w² / U_jj² over all rows; with N of every M, that of M columns when the walk reaches them. Each pruned
    weight's error w / U_jj is then spread over the columns to its right, w_k -= w / U_jj · U_jk, at once inside the
    block and for all later blocks together at its end.

    Args:
        weight: [out, in], float; changed in place.
        hessian: [in, in], XᵀX over all tokens, in any scale.
        keep: what is kept. Of a number of weights every block keeps its share, with the running total rounded.
        damping: the part of the mean of H's diagonal that is added to it.
        block: number of columns whose mask is chosen together.
        barred: True where a weight may not stay.
    """
    rows, columns = weight.shape
    dead = hessian.diagonal() == 0
    factor = inverse_factor(hessian, damping).to(weight.dtype)
    if isinstance(keep, tuple):
        block = math.ceil(block / keep[1]) * keep[1]  # no group is cut
    starts = range(0, columns, block)
    sizes = [rows * (min(start + block, columns) - start) for start in starts]
    kept = shares(keep, sizes) if isinstance(keep, int) else sizes
    pruned = ~keep if isinstance(keep, Tensor) else torch.zeros_like(weight, dtype=torch.bool)
    for start, left in zip(starts, kept, strict=True):
        at = slice(start, min(start + block, columns))
        inside, upper, gone = weight[:, at].clone(), factor[at, at], pruned[:, at]
        if isinstance(keep, int):
            gone.copy_(lowest(_costs(inside, factor, dead, barred, at), inside.numel() - left))
        errors = torch.zeros_like(inside)
        for j in range(inside.shape[1]):
            if isinstance(keep, tuple) and j % keep[1] == 0:
                group, ahead = slice(start + j, start + j + keep[1]), inside[:, j : j + keep[1]]
                pruned[:, group] = not_best(_costs(ahead, factor, dead, barred, group), *keep)
            errors[:, j] = torch.where(gone[:, j], inside[:, j], 0.0) / upper[j, j]
            inside[:, j:].addr_(errors[:, j], upper[j, j:], alpha=-1.0)
        weight[:, at] = inside.masked_fill_(gone, 0.0)
        weight[:, at.stop :].addmm_(errors, factor[at, at.stop :], alpha=-1.0)
    return pruned


def _costs(weight: Tensor, factor: Tensor, dead: Tensor, barred: Tensor | None, at: slice) -> Tensor:
    """w² / U_jj² of the columns `at`; below that features that were never active, and lowest what may not be kept."""
    costs = (weight / factor.diagonal()[at]).square().masked_fill_(dead[at], -1.0)
    return costs if barred is None else costs.masked_fill_(barred[:, at], -2.0)
