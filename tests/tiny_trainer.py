"""A PinsTrainer on tiny rows, and what its tests look at."""

from __future__ import annotations

import math

import torch
from transformers import PrinterCallback, TrainerCallback

import tiny_models
from pinscher import PruningConfig
from pinscher.prune import find_sites
from pinscher.train import checkpoint
from pinscher.train.trainer import PinsTrainer
from tiny_models import DROPOUT, HEADS, Head

LEARNED = ("movement", "smvp", "l0", "pst")
EXTRA = {
    "masked-lm": Head("tokens", "BertForMaskedLM", "BertConfig", tiny_models.BERT),
    "mixtral": Head("causal-lm", "MixtralForCausalLM", "MixtralConfig", {**tiny_models.LLAMA, "num_local_experts": 2}),
}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True}
SAVING = {"save_strategy": "steps", "save_steps": 3}


def trainer_for(folder, head="bert", *, cls=PinsTrainer, args=None, model=None, data=None, options=None, **more):
    """A trainer of this head on its rows; `args` are for TrainingArguments, `options` for the model."""
    head = (HEADS | EXTRA)[head]
    settings = {"per_device_train_batch_size": 4, "max_steps": 12} | (args or {})
    if settings["max_steps"] is None:
        del settings["max_steps"]
    trainer = cls(
        model=head.make(**(options or {})) if model is None else model,
        args=tiny_models.arguments(folder, **settings),
        train_dataset=tiny_models.rows(head.kind) if data is None else data,
        **{"eval_dataset": tiny_models.rows(head.kind, 8, seed=2), "data_collator": tiny_models.collator(head.kind)}
        | more,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def pruning(method="pins", sparsity=0.8, interval=2, **settings):
    options = {"batches": 3} if method == "snip" else {}
    return PruningConfig(method=method, sparsity=sparsity, interval=interval, options=options, **settings)


def zeros(model):
    return sum(int((site.effective == 0).sum()) for site in find_sites(model))


def wanted_zeros(model, sparsity=0.8):
    total = sum(site.numel for site in find_sites(model))
    return total - math.floor((1 - sparsity) * total + 0.5)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def copied(state):
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def logged(trainer, name):
    """The values of a figure by step."""
    return {line["step"]: line[name] for line in trainer.state.log_history if name in line}


class Spy(TrainerCallback):
    """Calls a function at an event: Spy(on_step_end=lambda state, model: ...)."""

    def __init__(self, **hooks):
        for event, hook in hooks.items():
            setattr(self, event, lambda args, state, control, hook=hook, **seen: hook(state, seen))


# ---------------------------------------------------------------- checkpoints

FILES = ("model.safetensors", checkpoint.TENSORS, checkpoint.VALUES)


def resumable(folder, method="pins", grouped=False, seed=0, args=None, **more):
    """22 rows, 2 a micro-batch, 2 micro-batches a step: 6 steps an epoch, of which the last is ragged."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 15}
    strategy = {"train_sampling_strategy": "group_by_length" if grouped else "random"}
    return trainer_for(
        folder,
        model=HEADS["bert"].make(seed, **DROPOUT),
        data=tiny_models.rows("classes", 22),
        args=EVALUATING | SAVING | sizes | strategy | (args or {}),
        **{"pruning": pruning(method)} | more,
    )


def contents(folder):
    """Weights, optimiser, pruner, teacher, random numbers: all that a checkpoint holds, as bytes."""
    return {name: (folder / name).read_bytes() for name in FILES}


# ---------------------------------------------------------------- objectives


def scripted(scores, seen=None):
    """A `validate` that gives these scores one after the other, and shows the trainer's model to `seen`."""
    left = list(scores)

    def validate(model):
        score = left.pop(0)
        if seen is not None:
            seen(score, model)
        return {"score": score}

    return validate


SCORED = {"metric_for_best_model": "score", "greater_is_better": True}
