"""The objective's second term: L = L_er + D(y_θ(t), y_θ(t_l)), with θ(t_l) the latest best student.

Self-regularisation: at every evaluation (step 0 included) a student that beats the best so far becomes the teacher, so
the teacher's sparsity rises with the student's. Knowledge distillation: a dense teacher, fixed. With a hardness h and
weights of hidden states and embeddings:

    L = (1 - h) L_er + h D_logits + w_hidden D_hidden + w_embeddings D_embeddings

In a plain loop:

    loss = teacher.joined(loss, teacher.terms(batch, outputs))
    ...
    teacher.consider(validation_score)          # every now and then
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pinscher import settings
from pinscher.errors import InputError
from pinscher.prune import hidden
from pinscher.prune.distillation import KINDS, compared, embeddings_apart, infer_kind, logits_of, named
from pinscher.prune.sharding import is_managed, local
from pinscher.prune.snapshot import Snapshot
from pinscher.settings import NOT_NEGATIVE, POSITIVE, STEPS, Names, Number, setting

SELF_REGULARIZATION, DISTILLATION, EMPIRICAL_RISK = "self-regularization", "knowledge-distillation", "empirical-risk"
OBJECTIVES = (SELF_REGULARIZATION, DISTILLATION, EMPIRICAL_RISK)
MIXES = ("sum", "entropy")
CACHEABLE = ("classes", "regression")  # a few numbers an example
OVERHEAD = 600  # bytes of Python and torch for each cached row
TOKENS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")  # inputs as long as the text


@dataclass(frozen=True)
class TeacherConfig:
    """The objective, and how the teacher is used. Every field has a help text in its metadata ("help")."""

    objective: str = setting(
        SELF_REGULARIZATION,
        f"{', '.join(OBJECTIVES)}: learn from the best student so far, from a dense teacher, or from the labels alone.",
        group="Training",
        takes=Names(OBJECTIVES),
    )
    mix: str = setting(
        "sum",
        "How to combine the teacher's term with the loss: sum (paper), or entropy, which weighs both for each example "
        "(reference code).",
        group="Training",
        takes=Names(MIXES),
    )
    temperature: float | None = setting(
        None,
        "Softens the outputs of student and teacher; by default 1 for sum, 2 for entropy.",
        group="Training",
        takes=dataclasses.replace(POSITIVE, most=1e6),
    )
    hardness: float | None = setting(
        None,
        "Share of the teacher's outputs in the loss: 1 ignores the labels; by default both count whole (paper).",
        group="Training",
        takes=Number(0, 1),
    )
    hidden_weight: float = setting(
        0.0,
        "Weight of the distance between the hidden states of student and teacher, layer by layer.",
        group="Training",
        takes=dataclasses.replace(NOT_NEGATIVE, most=1e6),
    )
    embeddings_weight: float = setting(
        0.0,
        "Weight of the same distance for the embeddings, before the first layer.",
        group="Training",
        takes=dataclasses.replace(NOT_NEGATIVE, most=1e6),
    )
    teacher_start: float = setting(
        0.0,
        "Steps before the student may become its own teacher; below 1, a fraction of all steps.",
        group="Training",
        takes=STEPS,
    )
    teacher_lag: float | None = setting(
        None,
        "Reject a self-teacher with more than this multiple of the student's weights; by default none (paper).",
        group="Training",
        takes=Number(1, why="a self-teacher has at least the student's weights"),
    )

    def __post_init__(self) -> None:
        settings.check(self)
        self.check_mix()

    @property
    def teaches_itself(self) -> bool:
        """Whether the teacher is the student's own best checkpoint."""
        return self.objective == SELF_REGULARIZATION

    @property
    def distils(self) -> bool:
        """Whether the teacher is a fixed, dense model."""
        return self.objective == DISTILLATION

    @property
    def is_taught(self) -> bool:
        """Whether there is a teacher at all."""
        return self.teaches_itself or self.distils

    def check_mix(self) -> None:
        """Raises InputError if both hardness and mix set the balance of labels and teacher."""
        if self.hardness is not None and self.mix == "entropy":
            raise InputError("hardness weighs labels and teacher for all examples alike: it goes with mix sum.")

    @classmethod
    def of(cls, config: TeacherConfig | str | None, more: Mapping[str, Any]) -> TeacherConfig:
        """A config with more settings by name. A text is the objective; `lag` is short for teacher_lag."""
        told = {"teacher_lag" if name == "lag" else name: value for name, value in more.items()}
        if isinstance(config, str):
            config, told = None, {"objective": config, **told}
        return dataclasses.replace(config or cls(), **told)


class Teacher:
    """Regularises a student by its own best checkpoint, by a fixed teacher, or not at all.

    Args:
        model: the student.
        config: a `TeacherConfig`, or only its objective: "self-regularization", "knowledge-distillation" or
            "empirical-risk" (no second term).
        fixed: the densely fine-tuned teacher of knowledge distillation; used as it is, in evaluation mode.
        kind: of the outputs: classes, regression, tokens, spans, causal-lm, seq2seq-lm, embeddings. None infers it, if
            it is unambiguous.
        greater_is_better: whether a higher validation score is better.
        cache_bytes: memory for cached outputs of the teacher; 0 switches the cache off. It is not used for a sharded
            student, whose forward passes need all ranks.
        settings: fields of TeacherConfig by name: objective, mix, temperature, hardness, lag, ….
    """

    def __init__(
        self,
        model: nn.Module,
        config: TeacherConfig | str | None = None,
        *,
        fixed: nn.Module | None = None,
        kind: str | None = None,
        greater_is_better: bool = True,
        cache_bytes: int = 512 << 20,
        **settings: Any,
    ) -> None:
        config = TeacherConfig.of(config, settings)
        if kind not in (None, *KINDS):
            raise ValueError(f"kind must be one of {', '.join(map(str, (None, *KINDS)))}, not {kind!r}")
        mix, temperature = config.mix, config.temperature
        if config.distils != (fixed is not None):
            raise ValueError(f"objective {DISTILLATION!r} needs the teacher as `fixed`, the others take none")
        if fixed is model:
            raise ValueError("the fixed teacher must be another model than the student: it would be frozen with it")
        self.objective, self.kind, self.mix = config.objective, kind, mix
        self.temperature = temperature if temperature is not None else (2.0 if mix == "entropy" else 1.0)
        self.hardness = config.hardness
        self.hidden_weight, self.embeddings_weight = config.hidden_weight, config.embeddings_weight
        self.greater_is_better, self.lag = greater_is_better, config.teacher_lag
        self.best: float | None = None  # validation score of the teacher
        self.density = 1.0  # fraction of the weights that the teacher has
        self.changes = 0  # how often the teacher has been replaced
        self.cache_bytes = cache_bytes
        self._cached = 0
        self._cache: dict[bytes, Tensor] = {}
        # The teacher stays out of every module tree: wrapped in objects that are not modules.
        self._fixed = (fixed.eval().requires_grad_(False),) if fixed is not None else ()
        self.snapshot = Snapshot(model) if config.teaches_itself else None

    @property
    def ready(self) -> bool:
        """Whether there is a teacher yet."""
        return bool(self._fixed) or self.best is not None

    def consider(self, score: float, density: float | None = None) -> bool:
        """Makes the student the new teacher if its validation score beats the teacher's, or if the teacher has
        fallen too far behind; returns whether it did.

        Args:
            score: the student's validation score.
            density: fraction of the student's weights that is left; needed with `lag`.
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

    @property
    def reads_hidden(self) -> bool:
        """Whether the student has to be called with output_hidden_states=True."""
        return self.ready and bool(self.hidden_weight or self.embeddings_weight)

    def loss(self, batch: Mapping[str, Any], outputs: Any) -> Tensor:
        """The term to add to the student's loss for this batch; zero while there is no teacher.

        Args:
            batch: the model's inputs, labels included.
            outputs: the student's outputs for that batch, or its logits.
        """
        if self.hardness is not None:
            raise ValueError("with a hardness the labels' loss counts in part: use joined(loss, terms(batch, outputs))")
        terms = self.terms(batch, outputs)
        if not terms:
            tensors = [outputs] if isinstance(outputs, Tensor) else [*named(outputs).values()]
            return next(t for t in tensors if isinstance(t, Tensor)).new_zeros(())
        return self.joined(next(iter(terms.values())).new_zeros(()), terms)

    def joined(self, loss: Tensor, terms: Mapping[str, Tensor]) -> Tensor:
        """The student's loss together with the teacher's terms."""
        if not terms:
            return loss
        share = self.hardness
        total = loss + terms["logits"] if share is None else (1 - share) * loss + share * terms["logits"]
        if "hidden" in terms:
            total = total + self.hidden_weight * terms["hidden"]
        if "embeddings" in terms:
            total = total + self.embeddings_weight * terms["embeddings"]
        return total

    def terms(self, batch: Mapping[str, Any], outputs: Any) -> dict[str, Tensor]:
        """The distances of student and teacher: of the "logits", and of "hidden" states and "embeddings" if they have a
        weight. Empty while there is no teacher.

        Args:
            batch: the model's inputs, labels included.
            outputs: the student's outputs for that batch, with hidden states if `reads_hidden`; or its logits.
        """
        if not self.ready:
            return {}
        if self.snapshot is not None:
            self.snapshot.own_what_thawed()  # in every step, for the next one may change it
        kind = self.kind or infer_kind(outputs)
        if not self.reads_hidden:
            return {"logits": self._logits_term(batch, outputs, self._outputs(batch, kind), kind)}
        mine = hidden.streams_of(outputs, batch)
        its = self._run(_inputs(batch, kind) | {"output_hidden_states": True})
        theirs = hidden.streams_of(its, batch)
        terms = {"logits": self._logits_term(batch, outputs, logits_of(its, kind), kind)}
        if self.hidden_weight:
            terms["hidden"] = hidden.layers_term(mine, theirs)
        if self.embeddings_weight:
            terms["embeddings"] = hidden.embeddings_term(mine, theirs)
        return terms

    def _logits_term(self, batch: Mapping[str, Any], outputs: Any, its: tuple[Tensor, ...], kind: str) -> Tensor:
        student = logits_of(outputs, kind)
        teacher = [logits.to(student[0].device) for logits in its]
        if kind == "embeddings":
            return embeddings_apart(student[0], teacher[0])
        if kind == "regression":
            # The reference code leaves regression to the labels.
            return F.mse_loss(student[0], teacher[0]) if self.mix == "sum" else student[0].new_zeros(())
        terms = []
        for side, (mine, other) in enumerate(zip(student, teacher, strict=True)):
            both = compared(kind, mine, other, batch, side)
            terms.append(both.divergence(self.temperature) if self.mix == "sum" else both.mixed(self.temperature))
        return torch.stack(terms).mean()

    # ------------------------------------------------------------ the teacher's outputs

    def _outputs(self, batch: Mapping[str, Any], kind: str) -> tuple[Tensor, ...]:
        """The teacher's logits; cached where they are few numbers for each example."""
        inputs = _inputs(batch, kind)
        keys = _fingerprints(inputs) if kind in CACHEABLE and self.cache_bytes and not self._together else []
        if not keys:
            return logits_of(self._run(inputs), kind)
        unknown = [row for row, key in enumerate(keys) if key not in self._cache]
        fresh: dict[bytes, Tensor] = {}
        if unknown:
            some = {n: v[unknown] if isinstance(v, Tensor) and v.dim() else v for n, v in inputs.items()}
            said = logits_of(self._run(some), kind)[0].cpu()
            fresh = dict(zip([keys[row] for row in unknown], said, strict=True))
        rows = torch.stack([fresh[key] if key in fresh else self._cache[key] for key in keys])
        for key, row in fresh.items():
            self._remember(key, row)
        return (rows,)

    @property
    def _together(self) -> bool:
        """Whether all ranks must run the teacher together: then none may skip a pass because of its cache."""
        return is_managed(self._fixed[0] if self._fixed else self.snapshot.student)  # type: ignore[union-attr]

    def _remember(self, key: bytes, row: Tensor) -> None:
        size = row.numel() * row.element_size() + len(key) + OVERHEAD
        if self._cached + size <= self.cache_bytes:
            self._cache[key] = row.clone()
            self._cached += size

    def _run(self, inputs: Mapping[str, Any]) -> Any:
        with torch.no_grad():
            return self._fixed[0](**inputs) if self._fixed else self.snapshot(inputs)  # type: ignore[misc]

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
            return  # another teacher: the cached outputs are those of the old one
        for key, row in zip(state["cache_keys"].tolist(), state["cache_rows"], strict=True):
            self._remember(bytes(key), row)

    @property
    def nbytes(self) -> int:
        """Memory of the snapshot and of cached outputs."""
        return (self.snapshot.nbytes if self.snapshot is not None else 0) + self._cached


def _inputs(batch: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The teacher's inputs; labels only where a decoder makes its inputs from them."""
    return {name: value for name, value in batch.items() if not _is_label(name) or kind == "seq2seq-lm"}


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
    """One key for each example: a hash of all its inputs, without the padding at the end, so that the length of the
    batch does not matter. Empty if the inputs cannot be split into rows.
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
