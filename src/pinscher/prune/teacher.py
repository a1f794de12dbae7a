"""The objective's second term: L = L_er + D(y_θ(t), y_θ(t_l)), with θ(t_l) the latest best student.

Self-regularisation: at every evaluation (step 0 included) a student that beats the best so far becomes the teacher, so
the teacher's sparsity rises with the student's. Knowledge distillation: a dense teacher, fixed. In a plain loop:

    loss = loss + teacher.loss(batch, outputs)
    ...
    teacher.consider(validation_score)          # every now and then
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pinscher.prune.distillation import KINDS, compared, infer_kind, logits_of, named
from pinscher.prune.sharding import is_managed, local
from pinscher.prune.snapshot import Snapshot

OBJECTIVES = ("self-regularization", "knowledge-distillation", "empirical-risk")
CACHEABLE = ("classes", "regression")  # a few numbers an example
OVERHEAD = 600  # bytes that Python and torch take for each remembered row
TOKENS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")  # inputs as long as the text


class Teacher:
    """Regularises a student by itself, by a fixed teacher, or not at all.

    Args:
        model: the student.
        objective: "self-regularization", "knowledge-distillation" or "empirical-risk" (no second term).
        fixed: the densely fine-tuned teacher of knowledge distillation; used as it is, in evaluation mode.
        kind: what the outputs are: classes, regression, tokens, spans, causal-lm, seq2seq-lm. None finds out, where
            there is no doubt.
        mix: "sum" adds the divergence to the loss (paper); "entropy" weighs both for each example (reference code).
        temperature: softens both sides; by default 1 for "sum" and 2 for "entropy".
        greater_is_better: whether a higher validation score is better.
        lag: how many times as many weights as the student the teacher may have; one with more gives way, whatever its
            score. None lets it stay until its score is beaten (paper).
        cache_bytes: how much memory remembered outputs of the teacher may take; 0 switches that off, and so does a
            sharded student, whose forward passes need all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: str = "self-regularization",
        *,
        fixed: nn.Module | None = None,
        kind: str | None = None,
        mix: str = "sum",
        temperature: float | None = None,
        greater_is_better: bool = True,
        lag: float | None = None,
        cache_bytes: int = 512 << 20,
    ) -> None:
        for name, value, allowed in (
            ("objective", objective, OBJECTIVES),
            ("kind", kind, (None, *KINDS)),
            ("mix", mix, ("sum", "entropy")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r}")
        if (objective == "knowledge-distillation") != (fixed is not None):
            raise ValueError("objective 'knowledge-distillation' needs the teacher as `fixed`, the others take none")
        if fixed is model:
            raise ValueError("the fixed teacher must be another model than the student: it would be frozen with it")
        self.objective, self.kind, self.mix = objective, kind, mix
        self.temperature = temperature if temperature is not None else (2.0 if mix == "entropy" else 1.0)
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, not {self.temperature}")
        if lag is not None and not lag >= 1:
            raise ValueError(f"lag must be at least 1, not {lag}: a teacher was the student")
        self.greater_is_better, self.lag = greater_is_better, lag
        self.best: float | None = None  # validation score of the teacher
        self.density = 1.0  # part of the weights that the teacher has
        self.changes = 0  # how often the teacher has been replaced
        self.cache_bytes = cache_bytes
        self._cached = 0
        self._cache: dict[bytes, Tensor] = {}
        # The teacher stays out of every module tree: wrapped in objects that are not modules.
        self._fixed = (fixed.eval().requires_grad_(False),) if fixed is not None else ()
        self.snapshot = Snapshot(model) if objective == "self-regularization" else None

    @property
    def ready(self) -> bool:
        """Whether there is a teacher yet."""
        return bool(self._fixed) or self.best is not None

    def consider(self, score: float, density: float | None = None) -> bool:
        """Takes the student as the new teacher if its validation score beats the teacher's, or if the teacher has
        fallen too far behind; says whether it did.

        Args:
            score: the student's validation score.
            density: part of the student's weights that are there; needed with `lag`.
        """
        if self.lag is not None and density is None:
            raise ValueError("a teacher with a lag must be told the student's density: consider(score, density)")
        if self.snapshot is None or math.isnan(score):
            return False
        if self.best is not None and not self._is_better(score) and not self._is_behind(density):
            return False
        self.best, self.density = float(score), 1.0 if density is None else density
        self.changes += 1
        self.snapshot.take()
        self._cache, self._cached = {}, 0
        return True

    def _is_better(self, score: float) -> bool:
        assert self.best is not None
        return score > self.best if self.greater_is_better else score < self.best

    def _is_behind(self, density: float | None) -> bool:
        return self.lag is not None and density is not None and self.density > self.lag * density

    def loss(self, batch: Mapping[str, Any], outputs: Any) -> Tensor:
        """The term to add to the student's loss for this batch; zero while there is no teacher.

        Args:
            batch: the model's inputs, labels included.
            outputs: the student's outputs for that batch, or its logits.
        """
        if not self.ready:
            tensors = [outputs] if isinstance(outputs, Tensor) else [*named(outputs).values()]
            return next(t for t in tensors if isinstance(t, Tensor)).new_zeros(())
        if self.snapshot is not None:
            self.snapshot.own_what_thawed()  # in every step, for the next one may change it
        kind = self.kind or infer_kind(outputs)
        student = logits_of(outputs, kind)
        teacher = [logits.to(student[0].device) for logits in self._outputs(batch, kind)]
        if kind == "regression":
            # The reference code leaves regression to the labels.
            return F.mse_loss(student[0], teacher[0]) if self.mix == "sum" else student[0].new_zeros(())
        terms = []
        for side, (mine, its) in enumerate(zip(student, teacher, strict=True)):
            both = compared(kind, mine, its, batch, side)
            terms.append(both.divergence(self.temperature) if self.mix == "sum" else both.mixed(self.temperature))
        return torch.stack(terms).mean()

    # ------------------------------------------------------------ the teacher's outputs

    def _outputs(self, batch: Mapping[str, Any], kind: str) -> tuple[Tensor, ...]:
        inputs = {name: value for name, value in batch.items() if not _is_label(name) or kind == "seq2seq-lm"}
        keys = _fingerprints(inputs) if kind in CACHEABLE and self.cache_bytes and not self._together else []
        if not keys:
            return self._run(inputs, kind)
        unknown = [row for row, key in enumerate(keys) if key not in self._cache]
        fresh: dict[bytes, Tensor] = {}
        if unknown:
            some = {n: v[unknown] if isinstance(v, Tensor) and v.dim() else v for n, v in inputs.items()}
            fresh = dict(zip([keys[row] for row in unknown], self._run(some, kind)[0].cpu(), strict=True))
        rows = torch.stack([fresh[key] if key in fresh else self._cache[key] for key in keys])
        for key, row in fresh.items():
            self._remember(key, row)
        return (rows,)

    @property
    def _together(self) -> bool:
        """Whether all ranks must run the teacher together: then none may leave out a pass for what it remembers."""
        return is_managed(self._fixed[0] if self._fixed else self.snapshot.student)  # type: ignore[union-attr]

    def _remember(self, key: bytes, row: Tensor) -> None:
        size = row.numel() * row.element_size() + len(key) + OVERHEAD
        if self._cached + size <= self.cache_bytes:
            self._cache[key] = row.clone()
            self._cached += size

    def _run(self, inputs: Mapping[str, Any], kind: str) -> tuple[Tensor, ...]:
        with torch.no_grad():
            outputs = self._fixed[0](**inputs) if self._fixed else self.snapshot(inputs)  # type: ignore[misc]
        return logits_of(outputs, kind)

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs; a fixed teacher is not part of it."""
        keys = list(self._cache)
        return {
            "objective": self.objective,
            "best": self.best,
            "changes": self.changes,
            "density": self.density,
            "fixed": _checksum(self._fixed[0]) if self._fixed else None,
            "snapshot": self.snapshot.state_dict() if self.snapshot is not None and self.best is not None else None,
            "cache_keys": torch.tensor([list(key) for key in keys], dtype=torch.uint8),
            "cache_rows": torch.stack([self._cache[key] for key in keys]) if keys else torch.empty(0),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["objective"] != self.objective:
            raise ValueError(f"the checkpoint's objective is {state['objective']!r}, this run's {self.objective!r}")
        if state["snapshot"] is not None and self.snapshot is not None:
            self.snapshot.load_state_dict(state["snapshot"])
        self.best, self.changes, self.density = state["best"], state["changes"], state.get("density", 1.0)
        self._cache, self._cached = {}, 0
        if self._fixed and state["fixed"] != _checksum(self._fixed[0]):
            return  # another teacher: what the old one said is of no use
        for key, row in zip(state["cache_keys"].tolist(), state["cache_rows"], strict=True):
            self._remember(bytes(key), row)

    @property
    def nbytes(self) -> int:
        """Memory of the snapshot and of remembered outputs."""
        return (self.snapshot.nbytes if self.snapshot is not None else 0) + self._cached


def _is_label(name: str) -> bool:
    return name in ("labels", "label", "label_ids", "start_positions", "end_positions", "num_items_in_batch")


def _checksum(model: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in model.state_dict().values():
        digest.update(_bytes(local(tensor)))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data


def _fingerprints(inputs: Mapping[str, Any]) -> list[bytes]:
    """One key for each example: a hash of all it is made of. Padding behind tokens is left out, so that the length of
    the batch does not matter. Empty if the inputs cannot be told apart by row.
    """
    tensors = {n: v for n, v in sorted(inputs.items()) if isinstance(v, Tensor) and v.dim() > 0}
    others = {n: v for n, v in sorted(inputs.items()) if n not in tensors}
    plain = all(v is None or isinstance(v, bool | int | float | str) for v in others.values())
    sizes = {v.shape[0] for v in tensors.values()}
    square = any(n not in TOKENS and v.dim() > 1 and v.shape[0] == v.shape[1] for n, v in tensors.items())
    if not plain or len(sizes) != 1 or square:  # a square may be a mask for all examples
        return []
    keys = []
    lengths = _lengths(tensors.get("attention_mask"))
    for row in range(sizes.pop()):
        digest = hashlib.blake2b(repr(others).encode(), digest_size=16)
        for name, tensor in tensors.items():
            values = tensor[row][: lengths[row]] if name in TOKENS and lengths else tensor[row]
            digest.update(f"{name}{values.dtype}{tuple(values.shape)}".encode())
            digest.update(_bytes(values))
        keys.append(digest.digest())
    return keys


def _lengths(mask: Tensor | None) -> list[int]:
    """How long each row is without the padding behind it."""
    if mask is None or mask.dim() != 2:
        return []
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (places * (mask != 0)).amax(1).tolist() if mask.shape[1] else []
