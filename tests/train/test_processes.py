"""What the first of several processes finds or refuses, all of them know."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

import tiny_sharded
from pinscher.errors import InputError
from pinscher.train.checksums import DamagedError
from pinscher.train.processes import agreed


def refused(kind, text):
    def look():
        raise kind(text)

    return look


def rank_main(rank, port, folder):
    """Each rank would find or refuse something else; it writes what it got."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    got = [agreed(lambda: [rank, "found"])]
    for kind in (InputError, DamagedError):
        try:
            agreed(refused(kind, f"rank {rank} refuses"))
        except InputError as error:
            got.append([type(error).__name__, str(error)])
    Path(folder, f"rank{rank}.json").write_text(json.dumps(got))
    tiny_sharded.leave()


def test_all_processes_know_what_the_first_found(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, (port, str(tmp_path)), nprocs=2)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first == [[0, "found"], ["InputError", "rank 0 refuses"], ["DamagedError", "rank 0 refuses"]]


def test_a_process_alone_agrees_with_itself():
    assert agreed(lambda: 7) == 7
    with pytest.raises(DamagedError, match="no"):
        agreed(refused(DamagedError, "no"))
