"""Applies masks that other tools store beside the weights, so that the effective weights are analysed.

    torch.nn.utils.prune         NAME.weight_orig · NAME.weight_mask
    torch parametrizations       NAME.parametrizations.weight.original · NAME.parametrizations.weight.0.mask
    movement pruning (emmental)  NAME.weight, NAME.mask_scores of its shape
    nn_pruning                   NAME.weight, NAME.mask_module.context_modules.I.mask_scores: blocks, rows, columns

Scores become a mask by the method and the threshold they were trained with:

    topK                  the highest fraction `threshold` of a matrix's scores is kept
    magnitude             the same of its weights' absolute values
    threshold             kept where the score is above the threshold
    sigmoied_threshold    kept where sigmoid(score) is above it (the name is the original's)
    l0                    kept where 1.2·sigmoid(score) - 0.1 is above 0; needs no threshold
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pinscher.errors import InputError
from pinscher.inspect.sources import Checkpoint, settings_beside
from pinscher.registry import Registry, unknown
from pinscher.settings import FINITE, Number, number

# Functions of a weight, its scores and the threshold that give a mask (True is kept).
METHODS: Registry[Callable[[Tensor, Tensor, float], Tensor]] = Registry("mask method")
WITHOUT_THRESHOLD = ("l0",)
OF_A_FRACTION = ("topK", "magnitude")  # methods whose threshold is the fraction of a matrix that is kept
FRACTION = Number(0, 1)
SCORES = re.compile(r"^(.+?)\.(?:mask_module\.context_modules\.(\d+)\.)?mask_scores$")
DENSE, ATTENTION = "dense_pruning_method", "attention_pruning_method"
# Names under which a matrix and its mask are stored.
PAIRS = (
    (".weight_orig", ".weight_mask"),
    (".parametrizations.weight.original", ".parametrizations.weight.0.mask"),
    (".parametrizations.weight.original0", ".parametrizations.weight.0.mask"),
)


@dataclass(frozen=True)
class Rule:
    """How scores become a mask."""

    method: str | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise InputError(unknown("mask method", self.method, METHODS) + ".")


UNKNOWN = Rule()  # for checkpoints without scores


def rule_for(checkpoint: Checkpoint, given: Rule) -> Rule:
    """The rule given by the user, completed from the settings beside the checkpoint.

    Emmental writes the method into config.json; nn_pruning writes methods and threshold into sparse_args.json.
    """
    told = settings_beside(checkpoint, "sparse_args.json")
    methods = {str(told[name]).split(":")[0] for name in told if name in (DENSE, ATTENTION)}
    if given.method is None and len(methods) > 1:
        raise InputError(f"{checkpoint.place} mixes mask methods ({', '.join(sorted(methods))}): only one is read.")
    stated = checkpoint.config.get("pruning_method") or next(iter(methods), None)
    method = given.method or (None if stated is None else str(stated))
    threshold = told.get("final_threshold") if given.threshold is None else given.threshold
    label = f"final_threshold in {checkpoint.place}/sparse_args.json" if given.threshold is None else "--mask-threshold"
    takes = FRACTION if method in OF_A_FRACTION else FINITE
    return Rule(method, None if threshold is None else number(takes, threshold, label))


@dataclass
class Applied:
    """Ordinary tensors, and notes about the masks that were applied."""

    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)


def applied(tensors: Mapping[str, Tensor], rule: Rule = UNKNOWN) -> Applied:
    """The tensors with every mask multiplied in, under the names of an ordinary model.

    Raises:
        InputError: if there are scores whose method or threshold is unknown.
    """
    done = Applied(dict(tensors))
    _pairs(done)
    _scores(done, rule)
    return done


def _pairs(done: Applied) -> None:
    counted = 0
    for original, mask in PAIRS:
        before, after = done.tensors, dict[str, Tensor]()  # in the same order
        for name, tensor in before.items():
            stem = name.removesuffix(original)
            if name.endswith(mask) and name.removesuffix(mask) + original in before:
                continue
            if not name.endswith(original):
                after[name] = tensor
                continue
            kept = before.get(stem + mask)
            if kept is not None and kept.shape != tensor.shape:
                raise InputError(f"{stem + mask} has shape {list(kept.shape)}, its weight {list(tensor.shape)}.")
            after[f"{stem}.weight"] = tensor if kept is None else _real(name, tensor) * _real(stem + mask, kept)
            counted += kept is not None
        done.tensors = after
    if counted:
        done.notes.append(f"{counted} matrices keep their mask beside the weight, as torch.nn.utils.prune does.")


def _real(name: str, tensor: Tensor) -> Tensor:
    """A tensor in a type that everything is computed in: there are types that torch only stores."""
    if tensor.is_complex():
        raise InputError(f"{name} holds complex numbers: no mask is applied to them.")
    return tensor.float()


def _scores(done: Applied, rule: Rule) -> None:
    found: dict[str, dict[int, Tensor]] = {}
    for name in [name for name in done.tensors if name.endswith("mask_scores")]:
        scores, match = done.tensors.pop(name), SCORES.match(name)
        if match is None or f"{match[1]}.weight" not in done.tensors:
            done.notes.append(f"{name} belongs to no weight of its name: left out.")
        else:
            found.setdefault(match[1], {})[int(match[2] or 0)] = _real(name, scores)
    if not found:
        return
    _check(rule, next(iter(found)))
    for stem, scores_of in found.items():
        weight = _real(stem, done.tensors[f"{stem}.weight"])
        done.tensors[f"{stem}.weight"] = weight * _mask(stem, weight, scores_of, rule)
    threshold = "" if rule.method in WITHOUT_THRESHOLD else f", threshold {rule.threshold:g}"
    done.notes.append(f"{len(found)} matrices have mask scores: pruned by {rule.method}{threshold}.")


def _check(rule: Rule, example: str) -> None:
    if rule.method is None:
        raise InputError(
            f"{example}.mask_scores decide which weights are pruned, but not by which method: give --mask-method, one "
            f"of {', '.join(METHODS)}."
        )
    if rule.method not in WITHOUT_THRESHOLD and rule.threshold is None:
        raise InputError(
            f"{example}.mask_scores decide which weights are pruned ({rule.method}), but the checkpoint does not say "
            "from which score on: give the final threshold of its training as --mask-threshold."
        )


def _mask(stem: str, weight: Tensor, scores_of: Mapping[int, Tensor], rule: Rule) -> Tensor:
    assert rule.method is not None
    kept = METHODS[rule.method](weight, _joined(stem, weight, scores_of), rule.threshold or 0.0)
    tall, wide = (whole // part for whole, part in zip(weight.shape, kept.shape, strict=True))
    return kept.repeat_interleave(tall, 0).repeat_interleave(wide, 1).to(weight.dtype)


def _joined(stem: str, weight: Tensor, scores_of: Mapping[int, Tensor]) -> Tensor:
    """One score for each weight or block of weights; those of rows and of columns are multiplied."""
    if set(scores_of) <= {0, 1} and all(scores.dim() == 1 for scores in scores_of.values()):
        ones = [torch.ones(1), torch.ones(1)]
        rows, columns = (scores_of.get(axis, ones[axis]) for axis in (0, 1))
        scores = rows[:, None] * columns[None, :]
    else:
        scores = scores_of[min(scores_of)]
    fits = scores.dim() == weight.dim() == 2 and all(
        s and w % s == 0 for w, s in zip(weight.shape, scores.shape, strict=True)
    )
    if not fits:
        raise InputError(f"{stem}.mask_scores {list(scores.shape)} do not fit their weight {list(weight.shape)}.")
    return scores


# ------------------------------------------------------------ methods


@METHODS.register("topK")
def _top(weight: Tensor, scores: Tensor, threshold: float) -> Tensor:
    return _highest(scores, threshold)


@METHODS.register("threshold")
def _above_threshold(weight: Tensor, scores: Tensor, threshold: float) -> Tensor:
    return _at_least_some(scores > threshold, scores)


@METHODS.register("sigmoied_threshold")
def _sigmoid_above_threshold(weight: Tensor, scores: Tensor, threshold: float) -> Tensor:
    return _at_least_some(torch.sigmoid(scores) > threshold, scores)


@METHODS.register("magnitude")
def _largest(weight: Tensor, scores: Tensor, threshold: float) -> Tensor:
    return _highest(weight.abs(), threshold)


@METHODS.register("l0")
def _open(weight: Tensor, scores: Tensor, threshold: float) -> Tensor:
    return 1.2 * torch.sigmoid(scores) - 0.1 > 0


def _at_least_some(kept: Tensor, scores: Tensor) -> Tensor:
    """The mask; one of the highest half percent of the scores if it keeps fewer, as the originals do."""
    least = int(0.005 * kept.numel()) + 1
    return kept if int(kept.sum()) >= least else _above(scores, max(kept.numel() - least, 1))


def _highest(values: Tensor, fraction: float) -> Tensor:
    """A mask of the highest fraction of the values, their number rounded down."""
    order = values.flatten().argsort(descending=True)
    kept = torch.zeros(values.numel(), dtype=torch.bool)
    kept[order[: int(fraction * values.numel())]] = True
    return kept.view(values.shape)


def _above(values: Tensor, rank: int) -> Tensor:
    return values > values.flatten().kthvalue(rank).values
