"""Registries: one name once, in order, and the nearest is suggested."""

from __future__ import annotations

from typing import Any

import pytest

from pinscher.models.families import FAMILIES
from pinscher.prune import CRITERIA, SCHEDULES
from pinscher.registry import Registry
from pinscher.store.codecs import CODECS
from pinscher.train.tasks import TASKS


def test_a_registry_refuses_a_second_entry_of_one_name() -> None:
    fruits: Registry[int] = Registry("fruit")
    assert fruits.register("apple")(1) == 1
    with pytest.raises(ValueError, match=r"^fruit 'apple' is registered twice$"):
        fruits.register("apple")(2)
    assert fruits["apple"] == 1


EVERY = [CRITERIA, SCHEDULES, TASKS, FAMILIES, CODECS]


@pytest.mark.parametrize("registry", EVERY, ids=lambda registry: registry.noun)
def test_what_the_package_registers_cannot_be_replaced(registry: Registry[Any]) -> None:
    name, before = next(iter(registry.items()))
    with pytest.raises(ValueError, match="is registered twice"):
        registry.register(name)(object)
    with pytest.raises(ValueError, match="is registered twice"):
        registry[name] = object
    with pytest.raises(ValueError, match="is registered twice"):
        registry.update({name: object})
    assert registry[name] is before


def test_a_registry_lists_its_names_in_order_and_suggests_the_nearest() -> None:
    fruits: Registry[int] = Registry("fruit")
    for number, name in enumerate(["pear", "apple", "plum"]):
        fruits.register(name)(number)
    assert list(fruits) == ["pear", "apple", "plum"]
    assert "plum" in fruits
    assert "fig" not in fruits
    assert (len(fruits), fruits.get("plum"), fruits.get("fig")) == (3, 2, None)
    with pytest.raises(ValueError, match=r"^unknown fruit 'aple'\. Did you mean 'apple'\? Known: pear, apple, plum$"):
        fruits["aple"]
    with pytest.raises(ValueError, match=r"^unknown fruit 'zzz'\. Known: pear, apple, plum$"):
        fruits["zzz"]


def test_an_empty_registry_knows_nothing() -> None:
    with pytest.raises(ValueError, match="unknown fruit 'apple'"):
        Registry[int]("fruit")["apple"]
