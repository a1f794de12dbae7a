"""Data from the hub, and data that comes along."""

import time

import datasets
import huggingface_hub
import pytest
from datasets import Dataset, DatasetDict
from huggingface_hub import constants

from pinscher.errors import InputError
from pinscher.models import hub
from pinscher.train.data import Source, load
from tiny_files import Tiny, numbers, table


def test_the_hub_is_asked_once_and_splits_come_by_name(monkeypatch):
    asked = []
    splits = DatasetDict(train=Dataset.from_list(table(20)), validation=Dataset.from_list(table(5, 50)))
    monkeypatch.setattr(hub, "_is_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *hub: asked.append(hub) or splits)
    task = Tiny(hub=("org/set", "part"))
    found = load(task, Source())
    assert asked == [("org/set", "part")]
    assert task.seen == ["split 'train' of org/set/part", "split 'validation' of org/set/part"]
    assert numbers(found.tests["validation"]) == list(range(50, 55))
    del splits["validation"]
    with pytest.raises(InputError, match=r"org/set/part has no file or split 'validation': .*\(train\)"):
        load(task, Source())


def test_a_hub_out_of_reach_is_one_sentence_soon(monkeypatch):
    monkeypatch.setattr(hub, "_is_reachable", lambda: False)
    start = time.monotonic()
    with pytest.raises(
        InputError, match=r"could not be reached \(no network\?\)\. Give the files with --data DIR"
    ) as error:
        load(Tiny(hub=("pinscher-nobody/no-such-set",)), Source())
    assert time.monotonic() - start < 10
    assert "ConnectionError: Couldn't reach 'pinscher-nobody/no-such-set'" in str(error.value)
    assert "\n" not in str(error.value)
    assert not constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_any_failure_of_the_hub_keeps_its_first_line(monkeypatch):
    def refuse(*_):
        raise RuntimeError("Dataset scripts are no longer supported.\nmore\nlines")

    monkeypatch.setattr(hub, "_is_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        InputError, match=r"a/b could not be reached .*RuntimeError: Dataset scripts are no longer supported\.\)$"
    ):
        load(Tiny(hub=("a/b",)), Source())


def test_the_probe_gives_up(monkeypatch):
    class Session:
        def __init__(self, act):
            self.head = act

    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.2)
    for act, answer in (
        (lambda *_, **__: time.sleep(2), False),
        (lambda *_, **__: 1 / 0, False),
        (lambda *_, **__: "404", True),
    ):
        monkeypatch.setattr(huggingface_hub, "get_session", lambda act=act: Session(act))
        start = time.monotonic()
        assert hub._is_reachable.__wrapped__() is answer
        assert time.monotonic() - start < 1


def test_offline_mode_is_not_probed(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_is_reachable", lambda: pytest.fail("asked the network"))
    with pytest.raises(InputError, match="could not be reached"):
        load(Tiny(hub=("pinscher-nobody/no-such-set",)), Source())


def test_bundled_data_comes_first():
    class Bundled(Tiny):
        def bundled(self):
            return {"train": Dataset.from_list(table(10)), "test": Dataset.from_list(table(2, 20))}

    splits = load(Bundled(hub=("not/asked",), test_splits=("test",)), Source())
    assert numbers(splits.tests["test"]) == [20, 21]

    class Missing(Tiny):
        def bundled(self):
            raise InputError("install the extra.")

    with pytest.raises(InputError, match="install the extra"):
        load(Missing(), Source())


def test_no_data_at_all():
    with pytest.raises(InputError, match="task 'tiny' has no data of its own: give --train-file FILE or --data DIR"):
        load(Tiny(), Source())
