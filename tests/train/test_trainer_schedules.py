"""Rewound rates, averaged weights, jumps and hidden-state terms in the Trainer: exact, and resumed to the bit."""

from __future__ import annotations

import pytest
import torch

from pinscher import PruningConfig
from pinscher.train import rates
from tiny_models import DROPOUT, HEADS
from tiny_trainer import Spy, contents, copied, logged, pruning, resumable, same, trainer_for, wanted_zeros, zeros

BETTER = {"lr_rewinds": 2, "average": True, "hidden_weight": 1.0, "embeddings_weight": 0.5}


def test_all_of_it_is_resumed_bit_by_bit(tmp_path):
    def make(folder, seed=0):
        return resumable(folder, seed=seed, pruning=pruning(jump=0.4, cooldown=0.5), **BETTER)

    whole = make(tmp_path / "whole")
    whole.train()
    for step in (6, 12):  # before the cool-down, and in it
        resumed = make(tmp_path / f"from-{step}", seed=5)
        resumed.train(str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert same(resumed.model.state_dict(), whole.model.state_dict())
        assert contents(tmp_path / f"from-{step}" / "checkpoint-15") == contents(tmp_path / "whole" / "checkpoint-15")
    assert zeros(whole.model) == wanted_zeros(whole.model)


def test_the_final_weights_are_the_mean_over_the_cool_down(tmp_path):
    seen: dict[int, dict[str, torch.Tensor]] = {}
    spy = Spy(on_step_end=lambda state, about: seen.update({state.global_step: copied(about["model"].state_dict())}))
    trainer = trainer_for(tmp_path, pruning=pruning(cooldown=0.5), objective="empirical-risk", average=True)
    trainer.add_callback(spy)
    trainer.train()
    name = "bert.encoder.layer.0.output.dense.weight"
    mean = torch.stack([seen[t][name] for t in range(6, 13)]).mean(0)
    final = trainer.model.state_dict()[name]
    assert torch.allclose(final[final != 0], mean[final != 0], atol=1e-6)
    assert torch.equal(final == 0, seen[12][name] == 0)
    assert zeros(trainer.model) == wanted_zeros(trainer.model)


def test_the_learning_rate_goes_back_to_its_peak(tmp_path):
    args = {"learning_rate": 1e-3, "warmup_steps": 2, "logging_steps": 1, "max_steps": 20}
    trainer = trainer_for(tmp_path, pruning=pruning(warmup=4, cooldown=8), args=args, lr_rewinds=2)
    trainer.train()
    wanted = rates.rewound(20, 2, rates.rewinds(2, 4, 12))
    found = logged(trainer, "learning_rate")
    assert found == pytest.approx({t: 1e-3 * wanted(t - 1) for t in found})
    assert [t - 1 for t, rate in found.items() if rate == pytest.approx(1e-3)] == [2, 8, 12]


def test_sparsity_jumps_when_the_warm_up_ends():
    schedule = PruningConfig(
        sparsity=0.9, total_steps=100, warmup=20, cooldown=30, interval=5, jump=0.6
    ).make_schedule()
    assert [schedule.density(t) for t in (19, 20, 70)] == pytest.approx([1.0, 0.4, 0.1])
    assert schedule.density(45) == pytest.approx(0.1 + 0.3 * 0.5**3)
    with pytest.raises(ValueError, match=r"jump must lie between 0 and sparsity, not 0\.95"):
        PruningConfig(sparsity=0.9, jump=0.95)


def test_the_log_has_every_term(tmp_path):
    more = {"objective": "knowledge-distillation", "teacher": HEADS["bert"].make(seed=7, **DROPOUT)}
    trainer = trainer_for(tmp_path, pruning=pruning(), args={"logging_steps": 4}, **more, **BETTER)
    trainer.train()
    for name in ("loss_er", "loss_sr", "loss_hidden", "loss_embeddings"):
        assert len(logged(trainer, name)) == 3
