"""What a matrix's inputs say of its weights: which go, and what the others do to make up for them. Pure functions.

Optimal Brain Surgeon: with the loss's change ½ δᵀHδ and the constraint w_q + δ_q = 0, pruning weight q costs and moves

    ρ_q = w_q² / (2 [H⁻¹]_qq)          δ = - w_q / [H⁻¹]_qq · H⁻¹ e_q

For one output row of a layer Y = X Wᵀ the squared error of the outputs has H = XᵀX, the same for all rows (SparseGPT).
Wanda is the same with H's diagonal alone and without δ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def shares(keep: int, parts: Sequence[int]) -> list[int]:
    """Deals `keep` places out to parts in proportion to their sizes, rounding the running total: the sum is exact."""
    total, seen, before, dealt = sum(parts), 0, 0, []
    for size in parts:
        seen += size
        upto = math.floor(keep * seen / total + 0.5)
        dealt.append(upto - before)
        before = upto
    return dealt


def lowest(scores: Tensor, count: int) -> Tensor:
    """True at the `count` lowest of all scores; of equal ones the later go first, as everywhere."""
    order = scores.reshape(-1).flip(0).argsort(stable=True)[:count]
    chosen = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    chosen[scores.numel() - 1 - order] = True
    return chosen.view(scores.shape)


def wanda(weight: Tensor, squares: Tensor, keep: int, barred: Tensor | None = None) -> Tensor:
    """The mask (True is pruned) of Wanda (Sun et al. 2023): scores |W_ij| · ‖X_j‖₂ compared within each output row i.

    Args:
        weight: [out, in].
        squares: [in], the sum of squares of each input feature over all tokens: ‖X_j‖₂².
        keep: weights left in the matrix; every row keeps keep / out of them, with the running total rounded.
        barred: True where a weight may not stay.
    """
    scores = weight.abs() * squares.sqrt().to(weight.dtype)
    if barred is not None:
        scores = scores.masked_fill(barred, -1.0)
    rows, columns = weight.shape
    kept = torch.tensor(shares(keep, [columns] * rows), device=weight.device)
    order = scores.argsort(dim=1, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(columns, device=weight.device).expand_as(order))
    return ranks >= kept[:, None]


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor U of H⁻¹ (H⁻¹ = UᵀU), with damping · mean(diag H) added to the diagonal of H.

    U_jj² = [(H_j:,j:)⁻¹]_00 and U_j,j: / U_jj is the first row of that inverse divided by its first entry: all that
    pruning column by column from the left needs, with columns that are done left out of H.
    """
    hessian = hessian.double().clone()
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1.0  # a feature that never was active: whatever its weights are, no output changes
    diagonal += damping * float(diagonal[~dead].mean() if not dead.all() else 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def sparsegpt_(
    weight: Tensor, hessian: Tensor, keep: int, damping: float = 0.01, block: int = 128, barred: Tensor | None = None
) -> Tensor:
    """SparseGPT (Frantar & Alistarh 2023): prunes a matrix in place and returns the mask (True is pruned).

    Columns are walked from left to right. At the start of each `block` of columns the mask of the block is chosen: the
    lowest w² / U_jj² over all rows. Each pruned weight's error w / U_jj is then spread over the columns to its right,
    w_k -= w / U_jj · U_jk, at once inside the block and for all later blocks together at its end.

    Args:
        weight: [out, in], float; changed in place.
        hessian: [in, in], XᵀX over all tokens, in any scale.
        keep: weights left in the matrix; every block keeps its share, with the running total rounded.
        damping: part of the mean of H's diagonal that is added to it.
        block: columns whose mask is chosen together.
        barred: True where a weight may not stay.
    """
    rows, columns = weight.shape
    dead = hessian.diagonal() == 0
    factor = inverse_factor(hessian, damping).to(weight.dtype)
    starts = range(0, columns, block)
    kept = shares(keep, [rows * (min(start + block, columns) - start) for start in starts])
    pruned = torch.zeros_like(weight, dtype=torch.bool)
    for start, left in zip(starts, kept, strict=True):
        at = slice(start, min(start + block, columns))
        inside, upper = weight[:, at].clone(), factor[at, at]
        scores = (inside / upper.diagonal()).square().masked_fill_(dead[at], -1.0)
        if barred is not None:
            scores.masked_fill_(barred[:, at], -2.0)
        gone = lowest(scores, scores.numel() - left)
        errors = torch.zeros_like(inside)
        for j in range(inside.shape[1]):
            errors[:, j] = torch.where(gone[:, j], inside[:, j], 0.0) / upper[j, j]
            inside[:, j:].addr_(errors[:, j], upper[j, j:], alpha=-1.0)
        weight[:, at] = inside.masked_fill_(gone, 0.0)
        weight[:, at.stop :].addmm_(errors, factor[at, at.stop :], alpha=-1.0)
        pruned[:, at] = gone
    return pruned
