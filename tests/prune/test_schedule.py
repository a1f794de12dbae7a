"""Schedules: the paths of the density, the steps of the maskings, and what does not fit."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinscher.prune.schedule import SCHEDULES, Constant, Cubic, Linear, OneShot, Schedule

KINDS = [Cubic, Linear, Constant, OneShot]
SLACK = 1e-15  # final + (initial - final) may round


def make(kind: type[Schedule] = Cubic, **changes: float) -> Schedule:
    values = {"total": 100, "warmup": 10, "cooldown": 35, "interval": 10, "final": 0.2, "initial": 1.0}
    return kind(**(values | changes))


def cubic_by_hand(t: int, total: int, t_i: int, t_f: int, r_f: float, r_i: float) -> float:
    """The published formula, in exact arithmetic."""
    if t < t_i:
        return r_i
    if t < total - t_f:
        left = Fraction(total - t_f - t, total - t_f - t_i)
        return float(Fraction(r_f) + (Fraction(r_i) - Fraction(r_f)) * left**3)
    return r_f


@st.composite
def fitting(draw: st.DrawFn, kinds: list[type[Schedule]] = KINDS, initial: float | None = None) -> Schedule:
    total = draw(st.integers(1, 200))
    cooldown = draw(st.integers(0, total - 1))
    final = draw(st.floats(0.0, 1.0))
    return draw(st.sampled_from(kinds))(
        total=total,
        warmup=draw(st.integers(0, total - cooldown)),
        cooldown=cooldown,
        interval=draw(st.integers(1, total - cooldown)),
        final=final,
        initial=draw(st.floats(final, 1.0)) if initial is None else initial,
    )


def path(schedule: Schedule) -> list[float]:
    return [schedule.density(t) for t in range(schedule.total + 1)]


def maskings(schedule: Schedule) -> list[int]:
    return [t for t in range(schedule.total + 1) if schedule.due(t)]


# ---------------------------------------------------------------- the paths


def test_these_schedules_are_registered_by_name() -> None:
    assert {name: SCHEDULES[name] for name in SCHEDULES} == {
        "cubic": Cubic,
        "linear": Linear,
        "constant": Constant,
        "one-shot": OneShot,
    }


@pytest.mark.parametrize(
    ("total", "warmup", "cooldown", "final", "initial"),
    [
        (100, 10, 35, 0.2, 1.0),
        (3120, 200, 1200, 0.1, 1.0),  # the published script for RTE: 20 epochs of 156 batches
        (100, 0, 0, 0.2, 1.0),
        (100, 0, 99, 0.0, 1.0),
        (50, 20, 30, 0.5, 1.0),  # no middle phase at all
        (50, 50, 0, 0.5, 1.0),
        (77, 5, 13, 0.05, 0.4),
        (1, 0, 0, 0.3, 1.0),
    ],
)
def test_cubic_is_the_published_formula(total: int, warmup: int, cooldown: int, final: float, initial: float) -> None:
    schedule = Cubic(total, warmup, cooldown, 1, final, initial)
    wanted = [cubic_by_hand(t, total, warmup, cooldown, final, initial) for t in range(total + 1)]
    assert path(schedule) == pytest.approx(wanted, rel=1e-13, abs=1e-15)


@given(fitting(kinds=[Cubic]))
def test_cubic_is_the_published_formula_for_any_numbers(s: Schedule) -> None:
    wanted = [cubic_by_hand(t, s.total, s.warmup, s.cooldown, s.final, s.initial) for t in range(s.total + 1)]
    assert path(s) == pytest.approx(wanted, rel=1e-12, abs=1e-15)


def test_cubic_at_a_few_steps_worked_out_by_hand() -> None:
    schedule = Cubic(total=100, warmup=20, cooldown=40, interval=10, final=0.2)
    assert [schedule.density(t) for t in (0, 19, 20, 60, 100)] == [1.0, 1.0, 1.0, 0.2, 0.2]
    assert schedule.density(40) == pytest.approx(0.2 + 0.8 / 8)
    assert schedule.density(50) == pytest.approx(0.2 + 0.8 / 64)


def test_linear_removes_as_many_weights_at_every_masking() -> None:
    schedule = make(Linear, warmup=10, cooldown=40, final=0.2)
    assert [schedule.density(t) for t in (0, 9, 10, 60, 100)] == [1.0, 1.0, 1.0, 0.2, 0.2]
    assert schedule.density(35) == pytest.approx(0.6)
    densities = [schedule.density(t) for t in range(10, 61, 10)]
    assert [a - b for a, b in pairwise(densities)] == pytest.approx([0.16] * 5)


def test_constant_has_the_final_density_from_the_end_of_the_warm_up_on() -> None:
    schedule = make(Constant, warmup=10, final=0.3)
    assert path(schedule) == [1.0] * 10 + [0.3] * 91


def test_one_shot_is_dense_until_the_cool_down() -> None:
    schedule = make(OneShot, warmup=10, cooldown=35, final=0.3)
    assert path(schedule) == [1.0] * 65 + [0.3] * 36


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_middle_phase_the_density_falls_at_once(kind: type[Schedule]) -> None:
    assert path(kind(total=50, warmup=20, cooldown=30, interval=5, final=0.5)) == [1.0] * 20 + [0.5] * 31


def test_only_one_shot_fixes_its_mask() -> None:
    assert [kind.once for kind in KINDS] == [False, False, False, True]


@settings(max_examples=200)
@given(fitting())
def test_density_never_rises_and_stays_in_bounds(schedule: Schedule) -> None:
    densities = path(schedule)
    assert all(later <= earlier + SLACK for earlier, later in pairwise(densities))
    assert all(schedule.final - SLACK <= d <= schedule.initial + SLACK for d in densities)
    assert densities[-1] == schedule.final


@given(fitting(initial=1.0))
def test_from_a_dense_start_the_density_is_a_fraction_without_any_slack(schedule: Schedule) -> None:
    densities = path(schedule)
    assert all(0.0 <= d <= 1.0 for d in densities)
    assert all(d == 1.0 for d in densities[: schedule.warmup])


@given(fitting())
def test_the_phases_lie_where_they_are_asked_for(schedule: Schedule) -> None:
    assert schedule.settled_at == schedule.total - schedule.cooldown
    for t, density in enumerate(path(schedule)):
        if t < schedule.warmup:
            assert density == schedule.initial
        if t >= schedule.settled_at:
            assert density == schedule.final
        assert schedule.settled(t) == (t >= schedule.total - schedule.cooldown)


def test_density_is_a_pure_function_of_the_step() -> None:
    schedule = make()
    forwards = path(schedule)
    assert [schedule.density(t) for t in reversed(range(101))] == forwards[::-1]
    assert schedule == make()


# ---------------------------------------------------------------- the maskings


def test_maskings_of_the_default_shape() -> None:
    # 10 is the end of the warm-up: still dense. 65 starts the cool-down, and lies between two multiples.
    assert maskings(make()) == [20, 30, 40, 50, 60, 65, 70, 80, 90, 100]


def test_the_last_step_is_masked_though_it_is_no_multiple() -> None:
    assert maskings(make(total=47, warmup=0, cooldown=20)) == [10, 20, 27, 30, 40, 47]


def test_a_model_that_starts_sparse_is_masked_in_the_warm_up_too() -> None:
    assert maskings(make(warmup=30, initial=0.5)) == [10, 20, 30, 40, 50, 60, 65, 70, 80, 90, 100]


def test_without_a_warm_up_nothing_is_masked_before_the_first_step() -> None:
    assert not make(warmup=0, initial=0.5).due(0)
    assert maskings(make(Constant, warmup=0))[0] == 10


@given(fitting(kinds=[Cubic, Linear, Constant]))
def test_due_at_multiples_at_the_cool_down_and_at_the_end(schedule: Schedule) -> None:
    steps = {*range(schedule.interval, schedule.total + 1, schedule.interval)}
    steps |= {schedule.total - schedule.cooldown, schedule.total}
    assert maskings(schedule) == sorted(t for t in steps if schedule.density(t) < 1.0)


@given(fitting())
def test_never_due_while_the_density_is_one(schedule: Schedule) -> None:
    assert not any(schedule.due(t) for t in range(schedule.total + 1) if schedule.density(t) == 1.0)


@given(fitting(initial=1.0))
def test_never_due_before_the_warm_up_of_a_dense_model_ends(schedule: Schedule) -> None:
    assert not any(schedule.due(t) for t in range(schedule.warmup))


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_of_no_sparsity_is_never_due(kind: type[Schedule]) -> None:
    assert maskings(make(kind, final=1.0)) == []


@given(fitting(kinds=[OneShot]))
def test_one_shot_is_due_exactly_once(schedule: Schedule) -> None:
    assert maskings(schedule) == ([schedule.settled_at] if schedule.final < 1.0 else [])


@given(fitting())
def test_a_sparse_target_is_always_masked_for(schedule: Schedule) -> None:
    """Whatever fits, the last masking is done at the final density."""
    due = maskings(schedule)
    assert bool(due) == (schedule.final < 1.0)
    assert all(schedule.density(t) == schedule.final for t in due[-1:])


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total": 0}, "total must be at least 1, not 0"),
        ({"total": -5}, "total must be at least 1, not -5"),
        ({"interval": 0}, "interval must be at least 1, not 0"),
        ({"interval": -10}, "interval must be at least 1, not -10"),
        ({"warmup": -1}, "warmup must be at least 0, not -1"),
        ({"cooldown": -1}, "cooldown must be at least 0, not -1"),
        ({"final": -0.1}, "final density must lie in [0, 1], not -0.1"),
        ({"final": 20}, "final density must lie in [0, 1], not 20"),
        ({"final": float("nan")}, "final density must lie in [0, 1], not nan"),
        ({"initial": 1.5}, "initial density must lie in [0, 1], not 1.5"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_impossible_numbers_are_errors_that_name_the_field(
    kind: type[Schedule], changes: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(kind, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_phases_longer_than_the_run_name_both_and_the_remedy(kind: type[Schedule]) -> None:
    with pytest.raises(ValueError, match="does not fit") as error:
        make(kind, total=100, warmup=70, cooldown=31)
    for word in ("warm-up 70", "cool-down 31", "100 steps", "Train longer or shorten them"):
        assert word in str(error.value)
    make(kind, total=101, warmup=70, cooldown=31)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interval_that_never_ends_names_the_longest_that_does(kind: type[Schedule]) -> None:
    with pytest.raises(ValueError, match="does not fit") as error:
        make(kind, total=100, cooldown=35, interval=66)
    for word in ("interval of 66", "Choose interval <= 65", "a shorter cool-down", "a longer run"):
        assert word in str(error.value)
    make(kind, total=100, cooldown=35, interval=65)


def test_a_cool_down_of_the_whole_run_is_an_error_with_a_remedy_that_exists() -> None:
    with pytest.raises(ValueError, match="Shorten it") as error:
        make(total=100, warmup=0, cooldown=100, interval=1)
    assert "interval <= 0" not in str(error.value), "no interval can be chosen that small"


def test_a_schedule_without_a_shape_is_unfinished() -> None:
    with pytest.raises(NotImplementedError):
        make(Schedule).density(50)
