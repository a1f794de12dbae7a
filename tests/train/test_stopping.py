"""A signal saves and stops; the resumed run is the same to the bit."""

from __future__ import annotations

import os
import signal

import pytest

from pinscher.train.stopping import Stopping
from tiny_trainer import Spy, contents, resumable, same, wanted_zeros, zeros


def interrupted(folder, number, step, args=None, times=1):
    """Sends this process a signal while the given step is computed."""
    stopping = Stopping()

    def send(state, found):
        if state.global_step == step - 1:
            for _ in range(times):
                os.kill(os.getpid(), number)

    trainer = resumable(folder, args=args, callbacks=[stopping, Spy(on_pre_optimizer_step=send)])
    with stopping.listening():
        trainer.train()
    return trainer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [4, 6, 9])  # between two checkpoints, at the end of an epoch, at a checkpoint
def test_a_signal_saves_and_stops_and_the_resumed_run_is_bit_identical(number, step, unbroken, tmp_path):
    before = signal.getsignal(number)
    stopped = interrupted(tmp_path / "run", number, step)
    assert stopped.state.global_step == step
    assert not stopped.pruner.finished
    assert max(int(path.name.split("-")[1]) for path in (tmp_path / "run").iterdir()) == step
    assert signal.getsignal(number) is before
    resumed = resumable(tmp_path / "run", seed=5)
    resumed.train(True)
    assert same(resumed.model.state_dict(), unbroken[1])
    assert contents(tmp_path / "run" / "checkpoint-15") == contents(unbroken[0] / "checkpoint-15")


def test_a_signal_in_the_last_step_changes_nothing(tmp_path):
    trainer = interrupted(tmp_path, signal.SIGTERM, 15)
    assert trainer.pruner.finished
    assert zeros(trainer.model) == wanted_zeros(trainer.model)


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path, signal.SIGINT, 4, times=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3"]
