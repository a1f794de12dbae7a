"""PinsTrainer in a real Trainer: every method, every head, precisions, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.utils import parametrize
from transformers import Trainer

import tiny_models
from pinscher.errors import InputError
from pinscher.prune import CRITERIA
from pinscher.prune.gates import gate_of
from tiny_models import DROPOUT, HEADS
from tiny_trainer import (
    EVALUATING,
    EXTRA,
    LEARNED,
    SAVING,
    Spy,
    copied,
    logged,
    pruning,
    same,
    trainer_for,
    wanted_zeros,
    zeros,
)

# ---------------------------------------------------------------- the order of the data


def test_the_order_that_the_arguments_ask_for_is_kept(tmp_path):
    """Sequential sampling is the Trainer's own; random and by length are ours, the same after a resume."""
    order = {
        strategy: list(trainer_for(tmp_path, args={"train_sampling_strategy": strategy})._get_train_sampler())
        for strategy in ("sequential", "random")
    }
    assert order["sequential"] == list(range(len(order["random"])))
    assert sorted(order["random"]) == order["sequential"] != order["random"]


# ---------------------------------------------------------------- every method, every head


@pytest.mark.parametrize("method", list(CRITERIA))
def test_every_criterion_ends_as_an_ordinary_sparse_model(method, tmp_path):
    trainer = trainer_for(tmp_path, args=EVALUATING, options=DROPOUT, pruning=pruning(method))
    before = copied(trainer.model.state_dict())
    trainer.train()
    model = trainer.model
    assert zeros(model) == wanted_zeros(model)
    assert not any(parametrize.is_parametrized(module) for module in model.modules())
    assert model.state_dict().keys() == before.keys()
    assert not same(model.state_dict(), before)
    trainer.save_model(tmp_path / "saved")
    again, info = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(again.state_dict(), model.state_dict())
    assert zeros(again) == wanted_zeros(model)
    assert logged(trainer, "density")[12] == pytest.approx(1 - zeros(model) / trainer.pruner.total)


@pytest.mark.parametrize("head", [*HEADS, "mixtral"])
def test_every_head_prunes_and_resumes(head, tmp_path):
    """Mixtral is stored under other names than its parameters have."""
    head_made = (HEADS | EXTRA)[head]
    head_made.make().save_pretrained(tmp_path / "start")
    states = []
    for resume in (None, str(tmp_path / "run" / "checkpoint-3")):
        model = getattr(transformers, head_made.model).from_pretrained(tmp_path / "start")
        folder = tmp_path / ("resumed" if resume else "run")
        args = EVALUATING | SAVING | {"max_steps": 6}
        trainer = trainer_for(folder, head, model=model, args=args, pruning=pruning(sparsity=0.5))
        trainer.train(resume)
        assert zeros(trainer.model) == wanted_zeros(trainer.model, 0.5)
        states.append(trainer.model.state_dict())
    assert same(*states)


def test_a_dense_run_prunes_nothing(tmp_path):
    trainer = trainer_for(tmp_path, args=SAVING, objective="empirical-risk")
    trainer.train()
    assert trainer.pruner is None
    assert zeros(trainer.model) == 0
    trainer.train()  # and may be trained again


# ---------------------------------------------------------------- learned masks


@pytest.mark.parametrize("method", LEARNED)
def test_gates_have_a_group_of_their_own(method, tmp_path):
    seen = {}

    def look(state, found):
        gates = [p for site in trainer.pruner.sites for p in gate_of(site).parameters() if p.requires_grad]
        originals = [site.owner for site in trainer.pruner.sites]
        seen.update(groups=found["optimizer"].param_groups, gates=gates, originals=originals)

    args = {"learning_rate": 1e-3, "weight_decay": 0.25}
    trainer = trainer_for(tmp_path, args=args, pruning=pruning(method), callbacks=[Spy(on_train_begin=look)])
    trainer.train()
    *others, last = seen["groups"]
    assert {id(p) for p in last["params"]} == {id(p) for p in seen["gates"]}
    assert last["initial_lr"] == (CRITERIA[method]().score_lr or 1e-3)  # none of its own: the model's
    assert last["weight_decay"] == 0.0
    rest = {id(p): group for group in others for p in group["params"]}
    assert not rest.keys() & {id(p) for p in seen["gates"]}
    assert all(group["initial_lr"] == 1e-3 for group in others)
    for original in seen["originals"]:  # weights below the gates train like any other, but for PST's, which are frozen
        assert (id(original) in rest) == (method != "pst")
        assert method == "pst" or rest[id(original)]["weight_decay"] == 0.25


@pytest.mark.parametrize("method", LEARNED)
def test_a_checkpoint_of_learned_masks_is_an_ordinary_model(method, tmp_path):
    """With the very weights that the model has at test time, in the middle of the run."""
    seen = {}

    def look(state, found):
        if state.global_step == 6:
            seen.update({f"{site.name}.weight": site.settled.clone() for site in trainer.pruner.sites})

    trainer = trainer_for(
        tmp_path, args=SAVING, options=DROPOUT, pruning=pruning(method, hold="always"), callbacks=[Spy(on_save=look)]
    )
    trainer.train()
    folder = tmp_path / "checkpoint-6"
    model, info = type(trainer.model).from_pretrained(folder, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert load_file(folder / "model.safetensors").keys() == HEADS["bert"].make().state_dict().keys()
    stored = model.state_dict()
    assert seen
    assert all(torch.equal(stored[name], tensor) for name, tensor in seen.items())
    assert 0.5 < zeros(model) / trainer.pruner.total < 0.8


# ---------------------------------------------------------------- what is refused


def test_load_best_model_at_end_is_refused(tmp_path):
    args = EVALUATING | SAVING | {"load_best_model_at_end": True}
    with pytest.raises(InputError, match='select="best"'):
        trainer_for(tmp_path, args=args, pruning=pruning())


def test_an_unknown_selection_is_refused(tmp_path):
    with pytest.raises(InputError, match="final, best"):
        trainer_for(tmp_path, pruning=pruning(), select="last")


def test_a_schedule_of_another_length_is_refused(tmp_path):
    trainer = trainer_for(tmp_path, pruning=pruning(total_steps=20))
    with pytest.raises(InputError, match="20 steps but this run has 12"):
        trainer.train()
    trainer_for(tmp_path, pruning=pruning(total_steps=12)).train()


def test_training_a_finished_model_again_is_refused(tmp_path):
    trainer = trainer_for(tmp_path, pruning=pruning())
    trainer.train()
    before = copied(trainer.model.state_dict())
    with pytest.raises(InputError, match="new PinsTrainer"):
        trainer.train()
    assert same(trainer.model.state_dict(), before)


@pytest.mark.parametrize("engine", ["is_deepspeed_enabled", "is_fsdp_enabled"])
def test_deepspeed_and_fsdp_are_refused(engine, tmp_path, monkeypatch):
    """Neither can be had on one CPU: the Trainer is told that it has it."""
    real = Trainer.create_accelerator_and_postprocess

    def pretend(self):
        real(self)
        setattr(self, engine, True)

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", pretend)
    with pytest.raises(InputError, match="not under DeepSpeed, and not with the Trainer's own fsdp"):
        trainer_for(tmp_path, pruning=pruning())


# ---------------------------------------------------------------- precision, compilation


@pytest.mark.parametrize("method", ["pins", "smvp"])
def test_bf16_keeps_the_weights_in_fp32(method, tmp_path):
    seen = set()

    def look(state, found):
        seen.update(p.grad.dtype for p in found["model"].parameters() if p.requires_grad)

    spy = Spy(on_pre_optimizer_step=look)
    trainer = trainer_for(tmp_path, args=EVALUATING | {"bf16": True}, pruning=pruning(method), callbacks=[spy])
    logits = []
    trainer.model.classifier.register_forward_hook(lambda module, inputs, output: logits.append(output.dtype))
    trainer.train()
    assert torch.bfloat16 in logits  # it is what it says
    assert {p.dtype for p in trainer.model.parameters()} == seen == {torch.float32}
    assert zeros(trainer.model) == wanted_zeros(trainer.model)
    assert all(math.isfinite(value) for value in logged(trainer, "loss").values())


def test_a_compiled_model_is_pruned_the_same(tmp_path):
    """Dynamo and AOT autograd; generating C++ on top of it takes inductor most of a minute here."""
    rows = [row for row in tiny_models.rows("classes", 200).to_list() if len(row["input_ids"]) == 8][:8]
    states = []
    for compiling in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        args = EVALUATING | SAVING | {"max_steps": 4, "eval_steps": 2, "save_steps": 2} | compiling
        trainer = trainer_for(
            tmp_path, args=args, data=rows, eval_dataset=rows, pruning=pruning(interval=1, sparsity=0.5, cooldown=1)
        )
        trainer.train()
        assert (type(trainer.model_wrapped).__name__ == "OptimizedModule") == bool(compiling)
        assert trainer.teacher.changes > 1
        assert zeros(trainer.model) == wanted_zeros(trainer.model, 0.5)
        type(trainer.model).from_pretrained(tmp_path / "checkpoint-4")
        states.append(trainer.model.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-3, atol=1e-5)
