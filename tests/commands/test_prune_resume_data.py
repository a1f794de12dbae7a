"""An interrupted run goes on with the data that it was started with, or not at all."""

from __future__ import annotations

import os
import shutil
import signal

from pinscher.train.stopping import Stopping
from tiny_command import SHORT, complaint

WHOLE = Stopping.on_step_end


def test_a_run_is_not_resumed_on_data_that_has_changed(command, sst2, tmp_path, monkeypatch):
    def interrupt(self, args, state, control, **kwargs):
        if state.global_step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return WHOLE(self, args, state, control, **kwargs)

    place = sst2.index("--data") + 1
    data = shutil.copytree(sst2[place], tmp_path / "data")
    flags = [*sst2[:place], str(data), *sst2[place + 1 :], *SHORT]
    with monkeypatch.context() as patched:
        patched.setattr(Stopping, "on_step_end", interrupt)
        assert command("prune", *flags, "--output", "out")[0] == 130
    train = next(path for path in sorted(data.iterdir()) if path.name.startswith("train"))
    before = train.read_text()
    train.write_text(before.replace("cat", "cow"))
    assert train.read_text() != before

    said = complaint(command("prune", "--resume", "out"))
    assert "the data has changed" in said
    assert "start a new run" in said
    train.write_text(before)
    assert command("prune", "--resume", "out")[0] == 0
