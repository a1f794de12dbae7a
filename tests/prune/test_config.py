"""PruningConfig and what a new setting takes: every field is checked, explained, and survives plain data."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pinscher import PruningConfig, settings
from pinscher.commands.flags import with_flags
from pinscher.errors import InputError
from pinscher.prune import CRITERIA, SCHEDULES
from pinscher.prune.config import HOLDS, STATE_DTYPES
from pinscher.prune.criteria import Pins, Platon, Snip
from pinscher.settings import setting
from pinscher.train.config import SECTIONS, RunConfig, TrainingConfig

METHODS = [
    "magnitude",
    "magnitude-oneshot",
    "random",
    "sensitivity",
    "platon",
    "pins",
    "snip",
    "wanda",
    "sparsegpt",
    "obert",
    "movement",
    "smvp",
    "l0",
    "pst",
]


def make(**changes: Any) -> PruningConfig:
    return PruningConfig(**({"total_steps": 100} | changes))


def message_of(**changes: Any) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the callers look at the message)
        make(**changes)
    return str(error.value)


# ---------------------------------------------------------------- fields


def test_the_defaults_are_the_papers() -> None:
    config = make()
    assert (config.method, config.schedule, config.interval) == ("pins", "cubic", 10)
    assert (config.sparsity, config.hold, config.regrow) == (0.8, "cooldown", True)
    assert (config.target_modules, config.exclude_modules, config.initial_sparsity) == (None, None, None)


@pytest.mark.parametrize("field", dataclasses.fields(PruningConfig), ids=lambda field: field.name)
def test_every_field_has_a_help_text(field: dataclasses.Field[Any]) -> None:
    text = field.metadata["help"]
    assert len(text) > 10
    assert text.endswith(".")


def test_the_help_texts_list_what_can_be_chosen() -> None:
    texts = {field.name: field.metadata["help"] for field in dataclasses.fields(PruningConfig)}
    choices = {"method": CRITERIA, "schedule": SCHEDULES, "hold": HOLDS, "state_dtype": STATE_DTYPES}
    for name, values in choices.items():
        assert all(value in texts[name] for value in values), name


def test_a_config_cannot_be_changed_behind_the_checks() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().sparsity = 80  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"Did you mean 0\.8"):
        dataclasses.replace(make(), sparsity=80)


@pytest.mark.parametrize("name", ["target_modules", "exclude_modules"])
def test_modules_are_a_name_or_a_tuple_of_names(name: str) -> None:
    assert getattr(make(**{name: "query"}), name) == "query"
    for several in (["query", "key"], ("query", "key"), iter(["query", "key"])):
        assert getattr(make(**{name: several}), name) == ("query", "key")


# ---------------------------------------------------------------- a new one


def test_a_new_setting_is_one_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line gives the attribute, the flag with its help, the flat and the nested key, config.yaml and the check."""
    patience = setting(3, "Steps to wait.", group="Training", takes=settings.COUNT)
    training = dataclasses.make_dataclass(
        "Training", [("patience", "int", patience)], bases=(TrainingConfig,), frozen=True
    )
    run = dataclasses.make_dataclass("Run", [], bases=(RunConfig, training), frozen=True)
    monkeypatch.setitem(SECTIONS, "training", (training,))
    assert run().patience == 3
    assert dataclasses.replace(run(), patience=5).patience == 5
    assert run.from_dict({"training": {"patience": "4"}}) == run.from_dict({"patience": 4})
    assert yaml.safe_load(yaml.safe_dump(run(patience=7).to_dict()))["patience"] == 7
    with pytest.raises(InputError, match=r"^--patience must be at least 1, not 0\.$"):
        run(patience=0)

    told: dict[str, Any] = {}
    command = with_flags(lambda **flags: told.update(flags), run)
    option = command.__annotations__["patience"].__metadata__[0]
    assert (option.help, option.rich_help_panel, option.metavar) == ("Steps to wait.", "Training", "<int>")
    command(patience="6")
    assert told == {"patience": 6}
    with pytest.raises(InputError, match=r"^--patience must be a whole number, not 'many'\.$"):
        command(patience="many")


# ---------------------------------------------------------------- refused values


@pytest.mark.parametrize(("percent", "meant"), [(80, "0.8"), (90.5, "0.905"), (1.5, "0.015"), (99, "0.99")])
def test_a_percentage_is_not_a_sparsity(percent: float, meant: str) -> None:
    assert message_of(sparsity=percent) == f"sparsity must lie in [0, 1), not {percent:g}. Did you mean {meant}?"


@pytest.mark.parametrize("value", [1, 1.0, 100, 250, -0.1, -80, math.nan, math.inf, -math.inf])
def test_a_sparsity_out_of_bounds_without_a_guess(value: float) -> None:
    message = message_of(sparsity=value)
    assert message.startswith("sparsity must lie in [0, 1)")
    assert "Did you mean" not in message


@pytest.mark.parametrize("value", [0, 0.0, 0.5, 0.999999])
def test_sparsities_in_bounds(value: float) -> None:
    assert make(sparsity=value).make_schedule().final == 1.0 - value


@pytest.mark.parametrize("value", [-0.1, 0.81, 1.0, 80, math.nan])
def test_initial_sparsity_lies_between_nothing_and_the_target(value: float) -> None:
    assert message_of(initial_sparsity=value).startswith("initial_sparsity must lie between 0 and sparsity")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("pin", "pins"),
        ("platoon", "platon"),
        ("magnitud", "magnitude"),
        ("magnitude_oneshot", "magnitude-oneshot"),
        ("moovement", "movement"),
        ("snp", "snip"),
        ("smpv", "smvp"),
        ("sensitivty", "sensitivity"),
        ("randm", "random"),
    ],
)
def test_an_unknown_method_suggests_what_was_meant(written: str, meant: str) -> None:
    message = message_of(method=written)
    assert message.startswith(f"unknown method {written!r}. Did you mean {meant!r}?")
    assert all(method in message for method in METHODS)


def test_a_method_like_no_other_is_an_error_without_a_guess() -> None:
    message = message_of(method="xyzzy")
    assert "Did you mean" not in message
    assert all(method in message for method in METHODS)


@pytest.mark.parametrize(
    ("written", "meant"), [("cubc", "cubic"), ("liner", "linear"), ("oneshot", "one-shot"), ("const", "constant")]
)
def test_an_unknown_schedule_suggests_what_was_meant(written: str, meant: str) -> None:
    message = message_of(schedule=written)
    assert message.startswith(f"unknown schedule {written!r}. Did you mean {meant!r}?")
    assert "cubic, linear, constant, one-shot" in message


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_schedule_is_an_error_for_every_method(method: str) -> None:
    assert message_of(method=method, schedule="cubc").startswith("unknown schedule 'cubc'")


def test_an_unknown_option_names_the_right_ones() -> None:
    message = message_of(options={"beta_1": 0.9})
    assert message == "method 'pins' has no option 'beta_1': its options are smoothing, beta1, beta2, score"
    assert (
        message_of(method="magnitude", options={"beta1": 0.9})
        == "method 'magnitude' has no option 'beta1': it has none"
    )


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("pins", {"score": "absolute"}, ["score", "abs, signed, update", "'absolute'"]),
        ("pins", {"smoothing": "mean"}, ["smoothing", "window, ema, none", "'mean'"]),
        ("pins", {"beta1": 1.0}, ["beta1", "[0, 1)", "1.0"]),
        ("platon", {"beta2": -0.5}, ["beta2", "[0, 1)", "-0.5"]),
        ("platon", {"timing": "during"}, ["timing", "after, before", "'during'"]),
        ("platon", {"smoothing": "none"}, ["smoothing", "window, ema", "'none'"]),
        ("snip", {"batches": 0}, ["batches", "at least 1", "0"]),
        ("pst", {"rank": 0}, ["rank", "at least 1", "0"]),
    ],
)
def test_a_wrong_value_of_an_option_names_the_right_ones(
    method: str, options: dict[str, Any], words: list[str]
) -> None:
    message = message_of(method=method, options=options)
    assert all(word in message for word in words)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("smvp", {"penalty": "much"}, "method 'smvp': penalty must be a number, not 'much'"),
        ("smvp", {"penalty": None}, "method 'smvp': penalty must be a number, not None"),
        ("l0", {"score_lr": True}, "method 'l0': score_lr must be a number, not True"),
        ("snip", {"batches": 2.5}, "method 'snip': batches must be a whole number, not 2.5"),
    ],
)
def test_an_option_that_is_no_number_is_an_error(method: str, options: dict[str, Any], message: str) -> None:
    assert message_of(method=method, options=options) == message


def test_a_number_may_be_written_as_text() -> None:
    """YAML reads 1e-4, unlike 1.0e-4, as a text."""
    assert make(method="smvp", options={"score_lr": "1e-4", "penalty": 3}).make_criterion().score_lr == 1e-4
    assert make(method="snip", options={"batches": "4"}).make_criterion().batches == 4


@pytest.mark.parametrize("value", ["cool-down", "", "sometimes", None])
def test_hold_names_its_choices(value: Any) -> None:
    assert message_of(hold=value) == f"hold must be one of cooldown, always, never, not {value!r}"


@pytest.mark.parametrize("value", ["float16", "bf16", ""])
def test_state_dtype_names_its_choices(value: str) -> None:
    assert message_of(state_dtype=value) == f"state_dtype must be one of float32, bfloat16, not {value!r}"


def test_the_number_of_steps_must_be_given_in_the_end() -> None:
    waiting = PruningConfig()  # a Trainer fills it in
    with pytest.raises(ValueError, match="total_steps is missing: the number of optimiser steps"):
        waiting.make_schedule()
    with pytest.raises(ValueError, match="total_steps must be the number of optimiser steps of the run, not 0"):
        PruningConfig(total_steps=0)
    assert "total_steps" in message_of(total_steps=-1)


@pytest.mark.parametrize(("name", "value"), [("total_steps", 100.5), ("total_steps", math.nan), ("interval", 2.5)])
def test_steps_are_counted_in_whole_numbers(name: str, value: float) -> None:
    """A run of 100.5 steps (rows / batch * epochs, forgotten to round) would never reach its last step."""
    assert name in message_of(**{name: value})


@pytest.mark.parametrize("name", ["warmup", "cooldown"])
@pytest.mark.parametrize("value", [-1, -0.1, 1.5, 20.25, math.nan, math.inf])
def test_phases_are_steps_or_fractions_and_nothing_else(name: str, value: float) -> None:
    assert message_of(**{name: value}).startswith(
        f"{name} must be a number of steps, or a fraction below 1; not {value}"
    )


def test_a_schedule_that_does_not_fit_is_refused_when_the_config_is_made() -> None:
    assert "warm-up 70 + cool-down 35" in message_of(warmup=70)
    assert "Choose interval <= 65" in message_of(interval=66)
    assert "interval must be at least 1" in message_of(interval=0)


# ---------------------------------------------------------------- the schedule in steps


@pytest.mark.parametrize(("warmup", "cooldown"), [(0.1, 0.35), (100, 350), (100.0, 350.0), (0.1, 350), (100, 0.35)])
def test_fractions_and_steps_mean_the_same(warmup: float, cooldown: float) -> None:
    schedule = make(total_steps=1000, warmup=warmup, cooldown=cooldown).make_schedule()
    assert (schedule.warmup, schedule.cooldown) == (100, 350)
    assert isinstance(schedule.warmup, int)
    assert isinstance(schedule.cooldown, int)


def test_one_is_a_step_and_nothing_is_nothing() -> None:
    schedule = make(warmup=1, cooldown=0).make_schedule()
    assert (schedule.warmup, schedule.cooldown) == (1, 0)


@given(st.integers(20, 10_000), st.floats(0, 0.4), st.floats(0, 0.4))
def test_fractions_become_the_nearest_step(total: int, warmup: float, cooldown: float) -> None:
    schedule = make(total_steps=total, warmup=warmup, cooldown=cooldown, interval=1).make_schedule()
    assert abs(schedule.warmup - warmup * total) <= 0.5
    assert abs(schedule.cooldown - cooldown * total) <= 0.5
    assert schedule.total == total


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_the_schedule_is_the_named_one(name: str) -> None:
    schedule = make(schedule=name, sparsity=0.9, interval=5).make_schedule()
    assert type(schedule) is SCHEDULES[name]
    assert (schedule.total, schedule.interval, schedule.final, schedule.initial) == (100, 5, 1.0 - 0.9, 1.0)


def test_the_start_is_the_models_own_unless_it_is_fixed() -> None:
    assert make().make_schedule(initial_density=0.7).initial == 0.7
    assert make(initial_sparsity=0.5).make_schedule().initial == 0.5
    assert make(initial_sparsity=0.0).make_schedule(initial_density=0.7).initial == 1.0


def test_snip_measures_its_batches_and_then_trains() -> None:
    for batches in (1, 10, 99):
        schedule = make(method="snip", options={"batches": batches}).make_schedule()
        assert [t for t in range(101) if schedule.due(t)] == [batches]
        assert schedule.density(batches - 1) == 1.0
        assert schedule.density(batches) == pytest.approx(0.2)


def test_snip_ignores_phases_that_it_does_not_have() -> None:
    config = make(method="snip", schedule="linear", warmup=0.9, cooldown=0.9, interval=1000)
    assert config.make_schedule() == make(method="snip").make_schedule()


@pytest.mark.parametrize(("batches", "steps"), [(10, 10), (10, 3), (100, 100)])
def test_snip_needs_steps_left_to_train(batches: int, steps: int) -> None:
    message = message_of(method="snip", total_steps=steps, options={"batches": batches})
    assert message == f"snip measures {batches} batches but the run has {steps} steps"
    make(method="snip", total_steps=batches + 1, options={"batches": batches})


def test_magnitude_one_shot_prunes_at_the_cool_down_without_a_warm_up() -> None:
    schedule = make(method="magnitude-oneshot", warmup=0.6).make_schedule()
    assert type(schedule) is SCHEDULES["one-shot"]
    assert schedule.warmup == 0
    assert [t for t in range(101) if schedule.due(t)] == [65]


# ---------------------------------------------------------------- the method as an object


def test_every_method_of_the_comparison_is_registered() -> None:
    assert sorted(CRITERIA) == sorted(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_made_with_its_options(method: str) -> None:
    criterion = make(method=method).make_criterion()
    assert type(criterion) is CRITERIA[method]
    assert criterion == CRITERIA[method]()
    assert type(criterion).__doc__


def test_options_reach_the_criterion() -> None:
    pins = make(options={"beta1": 0.5, "smoothing": "ema"}).make_criterion()
    assert pins == Pins(beta1=0.5, smoothing="ema")
    assert make(method="platon", options={"timing": "before"}).make_criterion() == Platon(timing="before")
    assert make(method="snip", options={"batches": 3}).make_criterion() == Snip(batches=3)


def test_the_published_betas_are_the_defaults() -> None:
    assert (Pins().beta1, Pins().beta2, Pins().score, Pins().smoothing) == (0.85, 0.99, "abs", "window")
    assert (Platon().beta1, Platon().beta2, Platon().timing) == (0.85, 0.95, "after")


@pytest.mark.parametrize("score", ["signed", "update"])
def test_averages_of_signed_scores_warn_and_single_steps_do_not(score: str) -> None:
    with pytest.warns(UserWarning, match="fell to chance"):
        make(options={"score": score})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(options={"score": score, "smoothing": "none"})


# ---------------------------------------------------------------- plain data


@pytest.mark.parametrize("method", METHODS)
def test_a_config_survives_json_for_every_method(method: str) -> None:
    options = dataclasses.asdict(CRITERIA[method]())
    config = make(
        method=method,
        sparsity=0.9,
        schedule="linear",
        warmup=5,
        interval=7,
        hold="always",
        regrow=False,
        initial_sparsity=0.1,
        target_modules=["query", r".*\.dense"],
        exclude_modules="layer.0.query",
        state_dtype="bfloat16",
        track_revived=True,
        options=options,
    )
    again = PruningConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.make_criterion() == config.make_criterion()
    assert again.make_schedule() == config.make_schedule()


@pytest.mark.parametrize("method", METHODS)
def test_the_defaults_survive_json_for_every_method(method: str) -> None:
    config = make(method=method)
    assert PruningConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_plain_data_has_every_field_and_no_tuples() -> None:
    data = make(target_modules=("query", "key")).to_dict()
    assert list(data) == [field.name for field in dataclasses.fields(PruningConfig)]
    assert data["target_modules"] == ["query", "key"]
    assert make(target_modules="query").to_dict()["target_modules"] == "query"


def test_plain_data_is_a_copy() -> None:
    config = make(options={"beta1": 0.5})
    config.to_dict()["options"]["beta1"] = 0.1
    assert config.options == {"beta1": 0.5}


def test_plain_data_with_an_unknown_field_names_it() -> None:
    with pytest.raises(TypeError, match="sparsty"):
        PruningConfig.from_dict({"total_steps": 100, "sparsty": 0.8})


def test_plain_data_is_checked_like_any_other() -> None:
    with pytest.raises(ValueError, match=r"Did you mean 0\.8"):
        PruningConfig.from_dict({"total_steps": 100, "sparsity": 80})
