"""The divergence of the student's outputs from the teacher's: the paper's D(y_θ(t), y_θ(t_l)), per kind of output.

Every function works on logits, without padding and ignored labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label that losses ignore
LOWEST = -1e30  # a logit whose softmax is 0 at any temperature
KINDS = ("classes", "regression", "tokens", "spans", "causal-lm", "seq2seq-lm", "embeddings")
DIRECTIONS, LIKENESS = 10.0, 10.0  # weights of the two terms of embeddings


def logits_of(outputs: Any, kind: str) -> tuple[Tensor, ...]:
    """The logits of a model's outputs: one tensor, or start and end for spans."""
    names = ("start_logits", "end_logits") if kind == "spans" else ("logits",)
    if isinstance(outputs, Tensor):
        return (outputs,)
    found = named(outputs)
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"kind {kind!r} needs {missing[0]} in the model's outputs; they have {', '.join(found)}")
    return tuple(found[name] for name in names)


def named(outputs: Any) -> Mapping[str, Any]:
    """A model's outputs by name."""
    if isinstance(outputs, Mapping):
        return outputs
    if not hasattr(outputs, "__dict__"):
        raise ValueError(f"outputs must have names (return_dict=True) or be logits, not a {type(outputs).__name__}")
    found: dict[str, Any] = vars(outputs)
    return found


def infer_kind(outputs: Any) -> str:
    """The kind of outputs, if it is unambiguous."""
    if not isinstance(outputs, Tensor) and "start_logits" in named(outputs):
        return "spans"
    (logits,) = logits_of(outputs, "classes")
    if logits.dim() == 2:
        return "regression" if logits.shape[1] == 1 else "classes"
    raise ValueError(
        f"logits of shape {tuple(logits.shape)}: say whether these are labels of tokens (kind='tokens'), the next "
        "words of a causal language model ('causal-lm') or a decoder's words ('seq2seq-lm')"
    )


def compared(kind: str, student: Tensor, teacher: Tensor, batch: Mapping[str, Any], side: int) -> _Compared:
    """Logits as [rows, classes] and labels, only of the rows that count."""
    labels = batch.get("labels")
    if kind == "classes":
        if labels is not None and labels.shape == student.shape[:1]:
            counts = labels != IGNORED
            student, teacher, labels = student[counts], teacher[counts], labels[counts]
        return _Compared(student, teacher, labels)
    if kind == "spans":
        mask, labels = batch.get("attention_mask"), batch.get(("start_positions", "end_positions")[side])
        if mask is None:
            return _Compared(student, teacher, labels)
        # Padding cannot be an answer, and is not a class in the student's entropy.
        student, teacher = (x.float().masked_fill(mask == 0, LOWEST) for x in (student, teacher))
        return _Compared(student, teacher, labels, classes=(mask != 0).sum(1))
    mask = batch.get("decoder_attention_mask" if kind == "seq2seq-lm" else "attention_mask")
    if kind == "causal-lm":  # position i predicts token i + 1
        student, teacher = student[:, :-1], teacher[:, :-1]
        labels, mask = (None if x is None else x[:, 1:] for x in (labels, mask))
    counts = torch.ones(student.shape[:2], dtype=torch.bool, device=student.device)
    if labels is not None:
        counts &= labels != IGNORED
    if mask is not None:
        counts &= mask != 0
    return _Compared(student[counts], teacher[counts], None if labels is None else labels[counts])


def embeddings_apart(student: Tensor, teacher: Tensor) -> Tensor:
    """How far two models' embeddings of the same texts are apart, [texts, features] each.

        10 · mean(1 − cos(student_i, teacher_i)) + 10 · mean((cos(student_i, student_j) − cos(teacher_i, teacher_j))²)

    The second term compares the likeness of all pairs of texts in the batch: it is what searching and clustering read.
    """
    student, teacher = F.normalize(student.float(), dim=-1), F.normalize(teacher.float(), dim=-1)
    turned = 1 - (student * teacher).sum(-1)
    return DIRECTIONS * turned.mean() + LIKENESS * F.mse_loss(student @ student.T, teacher @ teacher.T)


class _Compared:
    """Rows of student and teacher logits, with labels if there are any."""

    def __init__(self, student: Tensor, teacher: Tensor, labels: Tensor | None, classes: Tensor | None = None) -> None:
        self.student, self.teacher, self.labels = student.float(), teacher.float(), labels
        whole = torch.full(student.shape[:1], student.shape[-1], device=student.device)
        self.classes = whole if classes is None else classes

    def divergence(self, temperature: float) -> Tensor:
        """Mean KL(teacher || student) at a temperature, times its square so that gradients keep their size."""
        if self.student.shape[0] == 0:
            return self.student.sum() * 0.0
        log_student = F.log_softmax(self.student / temperature, dim=-1)
        log_teacher = F.log_softmax(self.teacher / temperature, dim=-1)
        return F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True) * temperature**2

    def mixed(self, temperature: float) -> Tensor:
        """What mean CE lacks of the reference code's mean of a KD + (1 - a) CE, with a = 1 - H(student) / log C.

        KD is T² times the cross-entropy between teacher and student at temperature T. The more certain the student,
        the more the teacher counts, and the less the labels.
        """
        if self.labels is None:
            raise ValueError("mix='entropy' weighs the labels' loss of each example: the batch must hold labels")
        counts = (self.labels >= 0) & (self.labels < self.student.shape[-1])
        student, teacher, labels = self.student[counts], self.teacher[counts], self.labels[counts]
        classes = self.classes[counts].float().clamp(min=2)
        if student.shape[0] == 0:
            return self.student.sum() * 0.0
        log_student = F.log_softmax(student, dim=-1)
        entropy = -(log_student.exp() * log_student).sum(-1)
        alpha = (1 - entropy / classes.log()).detach()
        soft = -(F.softmax(teacher / temperature, -1) * F.log_softmax(student / temperature, -1)).sum(-1)
        hard = F.nll_loss(log_student, labels, reduction="none")
        return (alpha * (soft * temperature**2 - hard)).mean()
