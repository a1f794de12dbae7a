"""How many threads a fast model gets."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

import pinscher
from pinscher.errors import InputError
from pinscher.runtime import cpus, kernels
from tiny_accelerated import batch, model_of


def test_never_more_threads_than_cpus():
    model, most = model_of("bert"), cpus.allowed()
    assert most == len(os.sched_getaffinity(0))
    with pytest.warns(UserWarning, match=f"threads=1024, but this process may use {most} CPUs") as seen:
        fast = pinscher.accelerate(model, mode="fp32", threads=1024)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert fast.base_model.fast_layers.threads == most
    assert torch.allclose(fast(**batch()).logits, model(**batch()).logits, atol=2e-5)


def test_a_stored_model_too(tmp_path):
    pinscher.save_pretrained(model_of("bert"), tmp_path / "small")
    with pytest.warns(UserWarning, match="this process may use") as seen:
        fast = pinscher.load(tmp_path / "small", threads=1024)
    assert seen[0].filename == __file__
    assert fast.base_model.fast_layers.threads == cpus.allowed()


def test_what_there_are_cpus_for_is_given_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.threads_of(1) == 1
        assert kernels.threads_of(cpus.allowed()) == cpus.allowed()
        assert kernels.threads_of(None) == min(torch.get_num_threads(), cpus.sustained())


def test_a_process_that_may_use_one_cpu_gets_one_thread():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert kernels.threads_of(None) == 1
        with pytest.warns(UserWarning, match="may use 1 CPU:"):
            assert kernels.threads_of(2) == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("threads", [0, -1, 1.0, True, "2", [2]])
def test_other_numbers_are_refused(threads):
    with pytest.raises(InputError, match="give a number from 1 to"):
        pinscher.accelerate(model_of("bert"), threads=threads)
