"""Every setting is declared once, and takes no value that makes no sense."""

from __future__ import annotations

import ast
import dataclasses
import math
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import pinscher
from pinscher import settings
from pinscher.errors import InputError
from pinscher.prune import CRITERIA, PruningConfig, TeacherConfig
from pinscher.prune.config import PruningSettings
from pinscher.settings import FRACTION, SEED, SPARSITY, STEPS
from pinscher.train.config import SECTIONS, RunConfig, RunPruning, RunTeacher, TrainingConfig
from pinscher.train.subject import DataConfig

SOURCE = Path(pinscher.__file__).parent
FIELDS = {field.name: field for field in dataclasses.fields(RunConfig)}
NUMBERS = [name for name, field in FIELDS.items() if settings.kind(field) in ("int", "float")]
OPTIONS = [(method, field.name) for method in CRITERIA for field in dataclasses.fields(CRITERIA[method])]
EDGES: list[Any] = [
    *(math.nan, math.inf, -math.inf, 0, -1, -0.0, 1, 0.5, 1.5, 1e300, 10**400, 10**5000, 2**31, 2**63),
    *(True, False, None, "", "text", "nan", ".inf", "1e400", "0.5", "1e3", [], [1], {}, {"a": 1}, b"1"),
]


# ------------------------------------------------------------ declared once


def _declared(path: Path) -> list[str]:
    """The names of the fields that a file declares in classes whose names end in Config, or that these are made of."""
    wanted = {kind.__name__ for kind in RunConfig.__mro__} | {"PruningConfig"}
    classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    return [
        node.target.id
        for kind in classes
        if kind.name in wanted
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def test_every_setting_is_declared_in_one_place_only() -> None:
    found = Counter(name for path in SOURCE.rglob("*.py") for name in _declared(path))
    assert set(found) >= {*FIELDS, *(field.name for field in dataclasses.fields(PruningConfig))}
    assert [name for name, times in found.items() if times > 1] == []


def test_a_new_setting_of_the_teacher_reaches_the_teacher_by_itself() -> None:
    config = RunConfig(mix="entropy", teacher_lag=1.5, teacher_start=0.25, temperature=3, sparsity=0.5)
    assert settings.values(config.teaching, TeacherConfig) == settings.values(config, TeacherConfig)
    assert dataclasses.replace(config, method="dense").teaching.objective == "empirical-risk"


def test_the_pruners_settings_are_the_runs() -> None:
    config = RunConfig(method="platon", sparsity=0.7, warmup=3, scope="layer", regrow=False, state_dtype="bfloat16")
    made = config.pruning(100)
    assert made is not None
    told = settings.values(config, PruningSettings) | {"interval": 5, "target_modules": None, "exclude_modules": None}
    assert settings.values(made, PruningSettings) == told


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_every_setting_says_what_it_is_for(field: dataclasses.Field[Any]) -> None:
    assert field.metadata["help"][0].isupper() or field.name == "objective"
    assert field.metadata["help"].endswith(".")
    assert field.metadata["group"] in ("Run", "Data", "Training", "Pruning")


def test_the_default_of_every_setting_is_one_that_it_takes() -> None:
    usual = RunConfig()
    assert RunConfig.from_dict(usual.to_dict()) == usual
    assert usual.to_dict()["target_modules"] == []
    assert usual.interval is None


# ------------------------------------------------------------ numbers


def _refusal(make: Any, name: str, value: Any, **more: Any) -> str | None:
    """What is said of a value; None if it is taken. Anything but an InputError is a failure."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = make(**{name: value}, **more)
    except InputError as error:
        return str(error)
    kept = getattr(made, name)
    if isinstance(kept, float):
        assert math.isfinite(kept)
        assert abs(kept) <= settings.LARGEST
    if isinstance(kept, int) and not isinstance(kept, bool):
        assert abs(kept) <= 2**32
    return None


def each_edge(test: Any) -> Any:
    for value in EDGES:
        test = example(value=value)(test)
    return test


@pytest.mark.parametrize("name", NUMBERS)
@given(value=st.one_of(st.floats(), st.integers(), st.text(max_size=8)))
@hypothesis.settings(max_examples=10)
@each_edge
def test_a_number_of_a_run_makes_sense_or_is_refused_by_its_flag(name: str, value: Any) -> None:
    said = _refusal(RunConfig, name, value, **({"lora_rank": 4} if name == "lora_alpha" else {}))
    if said is not None:
        assert len(said.splitlines()) == 1
        assert settings.flag(name) in said or "schedule does not fit" in said or "pattern" in said
        assert said.endswith((".", "?"))


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_no_value_of_any_setting_is_a_traceback(name: str) -> None:
    for value in EDGES:
        _refusal(RunConfig, name, value)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PruningConfig)])
def test_a_pruning_config_makes_sense_or_is_refused_by_its_field(name: str) -> None:
    for value in EDGES:
        try:
            said = _refusal(PruningConfig, name, value)
        except ValueError as error:  # of a pattern
            said = str(error)
        assert said is None or name in said or "schedule does not fit" in said or "pattern" in said or "method" in said


@pytest.mark.parametrize(("method", "name"), OPTIONS)
def test_an_option_of_a_method_makes_sense_or_is_refused_by_its_name(method: str, name: str) -> None:
    for value in EDGES:
        said = _refusal(CRITERIA[method], name, value)
        assert said is None or said.startswith(name)
        through = _refusal(RunConfig, "option", {name: value}, method=method)
        assert (through is None) == (said is None) or "does not fit" in str(through) or "snip measures" in str(through)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_grad_norm", [math.nan, -1, math.inf]),
        ("weight_decay", [-1, math.nan, math.inf, 1e300]),
        ("label_smoothing", [-1, 1, 2, math.nan]),
        ("lr_warmup", [math.nan, -1, math.inf, 1.5]),
        ("temperature", [math.nan, 0, -1, math.inf]),
        ("learning_rate", [math.inf, 1e300, math.nan, 0]),
        ("seed", [-1, 1e20, 2**32, 0.5, "1e20"]),
        ("epochs", [math.inf, math.nan, 0, 1e300]),
        ("validation_fraction", [0, 1, math.nan]),
        ("stride", [-1, math.inf]),
        ("lora_alpha", [0, -1, math.nan]),
        ("sparsity", [1, -0.1, math.nan, None, True, "much"]),
        ("batch_size", [0, -1, 0.5, True, None, 10**12]),
    ],
)
def test_nonsense_is_refused_with_the_flag_the_value_and_the_range(name: str, values: list[Any]) -> None:
    for value in values:
        said = _refusal(RunConfig, name, value, **({"lora_rank": 4} if name == "lora_alpha" else {}))
        assert said is not None, value
        assert said.startswith(f"{settings.flag(name)} must ")
        assert f"not {value!r}" in said or f"not {value}" in said


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_grad_norm", [0, 0.5]),
        ("label_smoothing", [0, 0.99]),
        ("lr_warmup", [0, 0.5, 200, "200"]),
        ("seed", [0, 2**32 - 1]),
        ("learning_rate", ["5e-5", 1]),
        ("max_steps", [0, 1]),
        ("teacher_lag", [1, 1.25, None]),
    ],
)
def test_what_makes_sense_is_taken(name: str, values: list[Any]) -> None:
    for value in values:
        made = RunConfig(**{name: value}, method="magnitude")
        assert getattr(made, name) == (None if value is None else float(value))


def test_phases_that_fit_no_run_are_refused_before_anything_is_read() -> None:
    with pytest.raises(InputError, match="the schedule does not fit"):
        RunConfig(warmup=0.6, cooldown=0.6)
    assert RunConfig(warmup=0.6, cooldown=0.6, method="snip").warmup == 0.6  # which has no such phases


@pytest.mark.parametrize(("number", "inside", "outside"), [(FRACTION, 0.5, 1), (SEED, 7, -1), (STEPS, 20, 1.5)])
def test_a_number_is_checked_alike_wherever_it_is_from(number: Any, inside: float, outside: float) -> None:
    assert settings.number(number, inside, "--it") == settings.number(number, str(inside), "--it") == inside
    for value in (outside, str(outside)):
        with pytest.raises(InputError, match=f"^--it must .* not {outside}"):
            settings.number(number, value, "--it")


def test_percent() -> None:
    for value in ("80%", "80 %"):
        with pytest.raises(InputError, match=r"80 % is 0\.8"):
            settings.number(SPARSITY, value, "--sparsity")
    assert settings.numbers_in(SPARSITY, ["0.5", 0.5, "5e-1"], "--sparsity") == [0.5]


# ------------------------------------------------------------ flat and nested


def test_sections_are_the_same_settings() -> None:
    nested = {
        "model": "m",
        "data": {"rows": 10, "text-column": "t"},
        "training": {"epochs": 2, "objective": "empirical-risk"},
        "teacher": {"mix": "entropy"},
        "pruning": {"sparsity": 0.9, "option": {"beta1": 0.5}},
    }
    flat = {
        "model": "m",
        "rows": 10,
        "text_column": ["t"],
        "epochs": 2.0,
        "objective": "empirical-risk",
        "mix": "entropy",
        "sparsity": 0.9,
        "option": {"beta1": 0.5},
    }
    assert RunConfig.from_dict(nested) == RunConfig(**flat)


def test_a_text_under_the_name_of_a_section_is_the_old_setting() -> None:
    made = RunConfig.from_dict({"data": "rows/", "teacher": "dense/", "objective": "knowledge-distillation"})
    assert (made.data, made.teacher) == ("rows/", "dense/")
    assert RunConfig.from_dict({"data": {"data": "rows/"}}).data == "rows/"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"sparsity": 0.5, "pruning": {"sparsity": 0.9}}, "gives sparsity twice"),
        ({"pruning": {"sparsty": 0.9}}, "pruning has an unknown setting 'sparsty'. Did you mean 'sparsity'?"),
        ({"data": {"epochs": 3}}, "data has an unknown setting 'epochs'"),
        ({"pruning": 3}, "unknown setting 'pruning'"),
        ({"sparsity": None}, "run.yaml: --sparsity must be a number, not None."),
        ({"regrow": 1}, "run.yaml: --regrow must be true or false, not 1."),
        ({"model": 5}, "--model must be text, not 5."),
        ({"option": [1]}, "--option must be values by name"),
        ({"text_column": [1]}, "--text-column must be a name or a list of names"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence(data: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        RunConfig.from_dict(data, "run.yaml")
    assert says in str(error.value)
    assert str(error.value).startswith("run.yaml")


def test_every_section_holds_settings_of_a_run() -> None:
    inside = {field.name for kinds in SECTIONS.values() for kind in kinds for field in dataclasses.fields(kind)}
    assert inside < set(FIELDS)
    assert set(FIELDS) - inside == {
        *("model", "task", "output", "overwrite", "recipe", "target_size", "export", "baseline", "seed", "select"),
        *("budget", "dense_start", "dense_steps", "dense_learning_rate"),
    }
    assert {DataConfig, TrainingConfig, RunTeacher, RunPruning} == {
        kind for kinds in SECTIONS.values() for kind in kinds
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\n# nothing\n", "is empty"),
        (b"\x80\x81\xff", "is not a text file"),
        (b"\x00\x01\x02", "is not YAML"),
        (b"- 1\n- 2\n", "must hold settings as NAME: VALUE"),
        (b"output: 2001-99-99\n", "is not YAML"),
        (b"a: [1\n", "is not YAML"),
        (b"[" * 1500, "is not YAML"),
    ],
)
def test_a_file_without_settings_is_one_sentence(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says) as error:
        RunConfig.settings_of(path)
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(("text", "name"), [("sparsity: .nan", "sparsity"), ("epochs: .inf", "epochs")])
def test_what_yaml_calls_a_number_need_not_be_one(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(InputError, match=f"--{name} must"):
        RunConfig.from_dict(RunConfig.settings_of(tmp_path / "run.yaml"))
