"""Registries: one name once, in order, and the nearest is suggested."""

from __future__ import annotations

from typing import Any

import pytest

from pinscher.prune import CRITERIA, SCHEDULES
from pinscher.registry import Registry


def test_a_registry_refuses_a_second_entry_of_one_name() -> None:
    fruits: Registry[int] = Registry("fruit")
    assert fruits.register("apple")(1) == 1
    with pytest.raises(ValueError, match=r"^fruit 'apple' is registered twice$"):
        fruits.register("apple")(2)
    assert fruits["apple"] == 1


@pytest.mark.parametrize(("registry", "name"), [(CRITERIA, "pins"), (SCHEDULES, "cubic")])
def test_what_the_package_registers_cannot_be_replaced(registry: Registry[Any], name: str) -> None:
    before = registry[name]
    with pytest.raises(ValueError, match="is registered twice"):
        registry.register(name)(object)
    assert registry[name] is before


def test_a_registry_lists_its_names_in_order_and_suggests_the_nearest() -> None:
    fruits: Registry[int] = Registry("fruit")
    for number, name in enumerate(["pear", "apple", "plum"]):
        fruits.register(name)(number)
    assert list(fruits) == ["pear", "apple", "plum"]
    assert "plum" in fruits
    assert "fig" not in fruits
    with pytest.raises(ValueError, match=r"^unknown fruit 'aple'\. Did you mean 'apple'\? Known: pear, apple, plum$"):
        fruits["aple"]
    with pytest.raises(ValueError, match=r"^unknown fruit 'zzz'\. Known: pear, apple, plum$"):
        fruits["zzz"]


def test_an_empty_registry_knows_nothing() -> None:
    with pytest.raises(ValueError, match="unknown fruit 'apple'"):
        Registry[int]("fruit")["apple"]
