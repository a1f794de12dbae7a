"""The command as a person meets it: help, plans, recipes, and one clear line for every mistake."""

import dataclasses
import errno
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import tiny_tasks
from pinscher import cli
from pinscher.store.file import Stored
from pinscher.train import plan as planning
from pinscher.train import recipes
from pinscher.train.config import RunConfig
from pinscher.train.stopping import Stopping
from pinscher.train.tasks import TASKS

# official sizes of the training sets (squad: windows)
ROWS = {"rte": 2490, "mrpc": 3668, "stsb": 5749, "cola": 8551, "sst2": 67349, "qnli": 104743, "mnli": 392702}
ROWS |= {"qqp": 363846, "squad": 88524, "conll2003": 14041, "e2e": 42061, "dart": 62659, "webnlg": 18025}
SHORT = ["--max-steps", "12", "--eval-every", "4", "--save-every", "4", "--batch-size", "8"]


@pytest.fixture(scope="module")
def sst2(tmp_path_factory):
    """A tiny model and tiny files of one task."""
    root = tmp_path_factory.mktemp("sst2")
    tiny_tasks.write_files("sst2", root / "data")
    tiny_tasks.tiny_model("sst2", root / "model")
    return ["--model", str(root / "model"), "--task", "sst2", "--data", str(root / "data")]


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs the command here; gives its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pinscher", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def complaint(outcome) -> str:
    """The one line that a mistake gives."""
    code, _, err = outcome
    assert code == 2, err
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert "Traceback" not in err
    assert lines[0].startswith("error: ")
    return lines[0]


# ------------------------------------------------------------ help, plan, recipes


def test_every_setting_is_a_flag(command):
    code, out, _ = command("prune", "--help")
    assert code == 0
    for setting in dataclasses.fields(RunConfig):
        assert f"--{setting.name.replace('_', '-')}" in out, setting.name
        assert setting.metadata["help"]
    assert all(flag in out for flag in ("--config", "--resume", "--dry-run"))


def test_help_cuts_nothing_on_a_narrow_terminal(tmp_path):
    environment = {**os.environ, "COLUMNS": "80"}
    for words in (["prune", "--help"], ["prune", "--recipe", "list"], ["eval", "--help"]):
        done = subprocess.run(
            [sys.executable, "-m", "pinscher", *words], env=environment, cwd=tmp_path, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        assert not re.search(r"\w…", done.stdout)  # a name that was cut


def test_the_version_and_the_commands(command):
    import pinscher

    assert command("--version")[1].strip() == pinscher.__version__
    assert all(word in command("--help")[1] for word in ("prune", "eval"))


def test_a_dry_run_prints_the_plan_and_writes_nothing(command, sst2, tmp_path):
    code, out, _ = command("prune", *sst2, *SHORT, "--dry-run")
    assert code == 0
    for word in ("steps", "12 matrices", "memory", "time", "warm-up", "█"):
        assert word in out, out
    assert list(tmp_path.iterdir()) == []


def test_only_so_many_rows(sst2):
    asked = {"model": sst2[1], "task": "sst2", "data": sst2[5], "max_steps": 12}
    made = planning.make(RunConfig(**asked, validation_rows=2, test_rows=3))
    assert len(made.splits.validation) == 2
    assert [len(rows) for rows in made.splits.tests.values()] == [3]
    assert len(planning.make(RunConfig(**asked)).splits.validation) > 2


def test_recipes_cover_every_cell_of_the_paper(command):
    code, out, _ = command("prune", "--recipe", "list")
    assert code == 0
    assert out.count("paper/") == len(recipes.RECIPES) == 8 * 4 + 4 + 2 + 3 + 6 + 6
    shown = {line.split()[0] for line in out.splitlines()[1:]}
    assert shown == set(recipes.RECIPES)
    for name, settings in recipes.RECIPES.items():
        config = RunConfig.from_dict({**settings, "recipe": name})
        assert config.task in TASKS
        rows = ROWS[config.task]
        steps = int(rows * 0.9 / config.batch_size * config.epochs)
        config.pruning(steps)  # the schedule fits
    rte = recipes.settings("paper/rte-80")
    assert (rte["epochs"], rte["batch_size"], rte["warmup"], rte["cooldown"], rte["lr_warmup"]) == (
        20,
        16,
        200,
        1200,
        200,
    )


def test_flags_win_over_the_file_and_the_file_over_the_recipe(command, sst2, tmp_path):
    (tmp_path / "run.yaml").write_text("learning-rate: 2e-4\nsparsity: 0.5\nepochs: 1\nrecipe: paper/sst2-90\n")
    flags = ["--config", "run.yaml", *sst2, "--sparsity", "0.6", *SHORT, "--warmup", "0.1", "--cooldown", "0.3"]
    code, _, err = command("prune", *flags, "--interval", "2", "--output", "here")
    assert code == 0, err
    said = yaml.safe_load((tmp_path / "here" / "config.yaml").read_text())["run"]
    assert (said["learning_rate"], said["sparsity"], said["batch_size"]) == (2e-4, 0.6, 8)
    assert json.loads((tmp_path / "here" / "result.json").read_text())["status"] == "finished"


# ------------------------------------------------------------ mistakes


def test_an_unknown_task_is_guessed(command, sst2):
    said = complaint(command("prune", "--model", sst2[1], "--task", "sst-2"))
    assert "Did you mean 'sst2'?" in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--sparsity", "80"], "Did you mean 0.8?"),
        (["--sparsity", "-0.1"], "must lie in [0, 1)"),
        (["--teacher-start", "-1"], "--teacher-start is a number of steps"),
        (["--teacher-lag", "0.5"], "--teacher-lag must be at least 1"),
        (["--teacher-start", "9999"], "is after the end of the run"),
        (["--method", "pin"], "Did you mean 'pins'?"),
        (["--objective", "self-regularisation"], "Did you mean 'self-regularization'?"),
        (["--select", "last"], "Known: final, best"),
        (["--batch-size", "0"], "--batch-size must be positive"),
        (["--epochs", "-1"], "--epochs must be positive"),
        (["--rows", "0"], "--rows must be at least 1"),
        (["--validation-rows", "0"], "--validation-rows must be at least 1"),
        (["--warmup", "100"], "the schedule does not fit"),
        (["--cooldown", "13"], "the schedule does not fit"),
        (["--option", "beta"], "NAME=VALUE"),
        (["--option", "gamma=1"], "has no option 'gamma'"),
        (["--select", "best", "--method", "smvp"], "learns its masks"),
        (["--teacher", "x"], "knowledge-distillation"),
        (["--text-column", "phrase"], "has no column 'phrase'"),
        (["--label-column", "mark"], "has no column 'mark'"),
        (["--beams", "4"], "no beams"),
        (["--recipe", "paper/rte-81"], "unknown recipe"),
        (["--target-modules", "nothing.like.this"], "nothing"),
        (["--target-size", "twenty"], "such as 20MB"),
        (["--target-size", "1KB"], "out of reach"),
        (["--target-size", "1MB", "--sparsity", "0.5"], "either --sparsity or --target-size"),
        (["--max-length", "100000"], "tokens"),
        (["--data", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--model", "./nothing-here"], "there is no model folder"),
        (["--config", "missing.yaml"], "cannot read missing.yaml"),
        (["--resume", "nothing"], "give no others"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(command, sst2, tmp_path, flags, says):
    said = complaint(command("prune", *sst2, *SHORT, "--output", "out", *flags))
    assert says in said
    assert not (tmp_path / "out").exists()


def test_an_unknown_setting_in_a_file(command, sst2, tmp_path):
    (tmp_path / "run.yaml").write_text("sparsty: 0.5\n")
    assert "Did you mean 'sparsity'?" in complaint(command("prune", *sst2, "--config", "run.yaml"))
    (tmp_path / "run.yaml").write_text("sparsity: many\n")
    assert "sparsity must be float" in complaint(command("prune", *sst2, "--config", "run.yaml"))
    (tmp_path / "run.yaml").write_text("a: [1\n")
    assert "not YAML" in complaint(command("prune", *sst2, "--config", "run.yaml"))


def test_an_empty_file(command, sst2, tmp_path):
    (tmp_path / "train.csv").write_text("")
    said = complaint(command("prune", *sst2[:2], "--task", "classification", "--train-file", "train.csv"))
    assert "train.csv" in said


def test_a_label_that_training_never_saw(command, sst2, tmp_path):
    (tmp_path / "train.csv").write_text("text,label\n" + "good film,yes\nbad film,no\n" * 20)
    (tmp_path / "test.csv").write_text("text,label\nodd film,maybe\n")
    flags = ["--task", "classification", "--train-file", "train.csv", "--test-file", "test.csv"]
    said = complaint(command("prune", *sst2[:2], *flags, *SHORT, "--output", "out"))
    assert "'maybe'" in said
    assert not (tmp_path / "out").exists()


def test_a_head_for_another_number_of_labels(command, sst2, tmp_path):
    (tmp_path / "train.csv").write_text("text,label\n" + "good film,a\nbad film,b\nfilm,c\n" * 20)
    assert command("prune", *sst2, *SHORT, "--output", "two")[0] == 0
    flags = ["--model", "two/model", "--task", "classification", "--train-file", "train.csv", *SHORT]
    said = complaint(command("prune", *flags, "--output", "out"))
    assert "2 labels, the task has 3" in said
    assert "--new-head" in said
    assert command("prune", *flags, "--output", "out", "--new-head")[0] == 0


def test_a_model_with_nothing_to_prune(command, sst2, tmp_path):
    from transformers import BertConfig, BertModel

    shutil.copytree(sst2[1], tmp_path / "empty")
    config = BertConfig.from_pretrained(sst2[1], num_hidden_layers=0)
    BertModel(config).save_pretrained(tmp_path / "empty")
    said = complaint(command("prune", "--model", "./empty", *sst2[2:], *SHORT, "--output", "out"))
    assert "prun" in said
    assert not (tmp_path / "out").exists()


def test_no_network(command, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = complaint(command("prune", "--model", "someone/no-such-model", "--task", "rte"))
    assert "no network" in said


def test_a_folder_that_cannot_be_written(command, sst2, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for place in ("file/run", "file", "/proc/run"):
        said = complaint(command("prune", *sst2, *SHORT, "--output", place))
        assert f"cannot write {place}" in said
    assert command("prune", *sst2, *SHORT, "--output", "run")[0] == 0
    assert "cannot write file" in complaint(command("eval", "run", "--output", "file"))


@pytest.mark.parametrize(
    "wrong", ["--train-file nosuch.csv", "--target-modules nosuch", "--report-to steam", "--report-to mlflow"]
)
def test_a_mistake_costs_nobody_an_earlier_run(command, sst2, tmp_path, wrong):
    flags = ["prune", *sst2, *SHORT, "--output", "out"]
    assert command(*flags)[0] == 0
    before = (tmp_path / "out" / "model" / "model.safetensors").read_bytes()
    complaint(command(*flags, *wrong.split(), "--overwrite"))
    assert (tmp_path / "out" / "model" / "model.safetensors").read_bytes() == before
    complaint(command(*flags[:-1], "new", *wrong.split()))
    assert not (tmp_path / "new").exists()
    if "modules" in wrong:
        assert "nothing to prune" in complaint(command(*flags[:-1], "new", *wrong.split(), "--dry-run"))
        assert "nothing to prune" in complaint(command(*flags[:-1], "new", *wrong.split(), "--target-size", "1MB"))


@pytest.mark.parametrize("failure", ["OSError", "safetensors"])
def test_a_full_disk(command, sst2, tmp_path, monkeypatch, failure):
    from pinscher import checkpoint

    def full(*args, **kwargs):
        if failure == "OSError":
            raise OSError(errno.ENOSPC, "No space left on device", "checkpoint")
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    said = complaint(command("prune", *sst2, *SHORT, "--output", "out"))
    assert "the disk is full" in said
    assert not list((tmp_path / "out").rglob("*.new"))
    assert not (tmp_path / "out" / "model").exists()


def test_a_run_is_not_overwritten_by_accident(command, sst2, tmp_path):
    flags = ["prune", *sst2, *SHORT, "--output", "out"]
    assert command(*flags)[0] == 0
    assert "--overwrite" in complaint(command(*flags))
    assert "nothing to resume" in complaint(command("prune", "--resume", "out"))
    assert command(*flags, "--overwrite")[0] == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert "not a run" in complaint(command("prune", *sst2, *SHORT, "--output", "mine", "--overwrite"))
    assert (tmp_path / "mine" / "thesis.txt").exists()


# ------------------------------------------------------------ runs


def test_the_budget_is_kept(command, sst2, tmp_path):
    full = sum(p.stat().st_size for p in Path(sst2[1]).glob("*.safetensors"))
    target = full // 5
    code, out, err = command("prune", *sst2, *SHORT, "--output", "out", "--target-size", str(target))
    assert code == 0, err
    path = tmp_path / "out" / "export" / "model.safetensors"
    assert 0.8 * target <= path.stat().st_size <= target
    assert "needs a sparsity of" in out
    wanted = float(re.search(r"sparsity of ([\d.]+)%", out)[1]) / 100
    assert abs(json.loads((tmp_path / "out" / "result.json").read_text())["sparsity"] - wanted) < 1e-3
    with Stored([path]) as file:
        stored = dict(file.items())
    model = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert set(stored) == set(model)
    assert all(bool((stored[name][model[name] == 0] == 0).all()) for name in model)


def test_the_baseline_and_distillation_make_a_dense_run_first(command, sst2, tmp_path):
    flags = ["--objective", "knowledge-distillation", "--baseline", "--select", "best"]
    code, out, err = command("prune", *sst2, *SHORT, "--output", "out", *flags)
    assert code == 0, err
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    dense = json.loads((tmp_path / "out" / "dense" / "result.json").read_text())
    assert dense["method"] == "dense"
    assert dense["sparsity"] == 0.0
    assert result["metrics"]["dense"] == dense["metrics"]["pruned"]
    assert "of the dense accuracy" in " ".join(out.split())
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert any("loss_sr" in line for line in log)


@pytest.mark.parametrize("lag", [[], ["--teacher-lag", "1"]])
def test_the_teacher_is_told_when_to_start_and_how_near_to_stay(lag, command, sst2, tmp_path):
    flags = ["--teacher-start", "0.5", "--eval-every", "2", *lag]
    code, _, err = command("prune", *sst2, *SHORT, "--output", "out", *flags)
    assert code == 0, err
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in log if line["event"] == "teacher"]
    total = json.loads((tmp_path / "out" / "result.json").read_text())["total_steps"]
    assert min(steps) == math.ceil(round(0.5 * total) / 2) * 2
    evaluated = [line["step"] for line in log if line["event"] == "eval" and line["step"] >= min(steps)]
    density = {line["step"]: line["density"] for line in log if line["event"] == "train"}
    fallen = [step for before, step in itertools.pairwise(evaluated) if density[step] < density[before]]
    assert fallen
    assert set(fallen) <= set(steps) or not lag


def test_a_signal_in_the_last_step_of_the_dense_run_starts_no_other(command, sst2, tmp_path, monkeypatch):
    whole = Stopping.on_step_end

    def interrupt(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, args, state, control, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Stopping, "on_step_end", interrupt)
        code, out, err = command("prune", *sst2, *SHORT, "--output", "out", "--baseline")
    assert code == 130, err
    assert "Continue with: pinscher prune --resume out" in out
    assert json.loads((tmp_path / "out" / "dense" / "result.json").read_text())["status"] == "finished"
    assert not (tmp_path / "out" / "log.jsonl").exists()
    assert command("prune", "--resume", "out")[0] == 0
    assert json.loads((tmp_path / "out" / "result.json").read_text())["status"] == "finished"


def test_a_term_signal_saves_and_the_resumed_run_is_the_same(sst2, tmp_path):
    """A real process, a real signal."""
    flags = [*sst2, "--max-steps", "60", "--eval-every", "10", "--save-every", "100", "--batch-size", "8"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "pinscher", "prune"]
    with subprocess.Popen(
        [*start, *flags, "--output", "cut"], cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE
    ) as process:
        log = tmp_path / "cut" / "log.jsonl"
        while process.poll() is None and not (log.exists() and len(log.read_text().splitlines()) > 15):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        out = process.communicate()[0]
    assert process.returncode == 130, out
    assert "Continue with: pinscher prune --resume cut" in out
    assert json.loads((tmp_path / "cut" / "result.json").read_text())["status"] == "interrupted"
    subprocess.run([*start, "--resume", "cut"], cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(
        [*start, *flags, "--output", "whole"], cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL
    )
    cut, whole = (tmp_path / name / "model" / "model.safetensors" for name in ("cut", "whole"))
    assert cut.read_bytes() == whole.read_bytes()
    steps = [
        [
            json.loads(line)["step"]
            for line in (tmp_path / name / "log.jsonl").read_text().splitlines()
            if json.loads(line)["event"] == "train"
        ]
        for name in ("cut", "whole")
    ]
    assert steps[0] == steps[1]


LAUNCHERS = {
    "torchrun": "torch.distributed.run --nproc-per-node 2 --master-port 0 --rdzv-backend c10d "
    "--rdzv-endpoint localhost:0",
    "accelerate": "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --main_process_port 0",  # without a GPU these are two processes on the CPU
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes(launcher, sst2, tmp_path):
    """DDP on two gloo processes: one writer, one log."""
    launch = [sys.executable, "-m", *LAUNCHERS[launcher].split(), "-m", "pinscher", "prune"]
    flags = [
        *sst2,
        "--max-steps",
        "12",
        "--eval-every",
        "4",
        "--save-every",
        "4",
        "--batch-size",
        "4",
        "--output",
        "two",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *flags], cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("finished", 12)
    assert abs(result["sparsity"] - 0.8) < 1e-3
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()
        if json.loads(line)["event"] == "train"
    ]
    assert steps == sorted(set(steps))
    assert done.stdout.count("testing on") == 1


def test_eval_of_anyones_checkpoint(command, sst2, tmp_path):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(sst2[1], num_labels=2)  # LABEL_0, LABEL_1
    model.save_pretrained(tmp_path / "theirs")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(sst2[1]) / name, tmp_path / "theirs")
    code, out, err = command("eval", "./theirs", *sst2[2:], "--output", "said")
    assert code == 0, err
    assert "accuracy" in out
    lines = (tmp_path / "said" / "SST-2.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    assert {line.split("\t")[1] for line in lines[1:]} <= {"0", "1"}
    assert "--task" in complaint(command("eval", "./theirs"))
    assert "--batch-size" in complaint(command("eval", "./theirs", *sst2[2:], "--batch-size", "-3"))
    assert "--test-rows" in complaint(command("eval", "./theirs", *sst2[2:], "--rows", "0"))
    assert "it has no classifier" in complaint(command("eval", str(sst2[1]), *sst2[2:]))


def test_eval_knows_labels_in_any_order_and_writing(command, sst2, tmp_path):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(sst2[1], num_labels=2)
    model.classifier.weight.data.zero_()
    found = {}
    for name, labels in {"plain": "negative positive", "turned": "POSITIVE NEGATIVE", "other": "good bad"}.items():
        model.classifier.bias.data = torch.tensor([0.0, 1.0] if name == "plain" else [1.0, 0.0])  # always positive
        model.config.id2label = dict(enumerate(labels.split()))
        model.config.label2id = {label: i for i, label in enumerate(labels.split())}
        model.save_pretrained(tmp_path / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(sst2[1]) / file, tmp_path / name)
        found[name] = command("eval", f"./{name}", *sst2[2:], "--output", f"said-{name}")
    assert "which is which is not known" in complaint(found["other"])
    plain, turned = ((tmp_path / f"said-{name}" / "SST-2.tsv").read_text() for name in ("plain", "turned"))
    assert plain == turned
    assert {line.split("\t")[1] for line in plain.splitlines()[1:]} == {"1"}
    flags = [*sst2, *SHORT, "--objective", "knowledge-distillation", "--teacher", "./turned", "--output", "out"]
    assert "in the same order" in complaint(command("prune", *flags))


def test_an_interrupted_run_says_so(command, sst2, tmp_path):
    assert command("prune", *sst2, *SHORT, "--output", "out")[0] == 0
    shutil.rmtree(tmp_path / "out" / "model")
    assert "--resume out" in complaint(command("eval", "out"))
    assert "no others" in complaint(command("prune", "--resume", "out", "--dry-run"))


def test_a_run_that_split_off_its_own_test_is_evaluated_on_the_same_rows(command, sst2, tmp_path):
    rows = "".join(f"good film {i},yes\nbad film {i},no\n" for i in range(40))
    (tmp_path / "train.csv").write_text("text,label\n" + rows)
    flags = ["--task", "classification", "--train-file", "train.csv", *SHORT, "--eval-batch-size", "5"]
    code, _, err = command("prune", *sst2[:2], *flags, "--output", "out", "--target-size", "1MB")
    assert code == 0, err
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    for words in (["out"], ["out", "--task", "classification"]):
        assert command("eval", *words)[0] == 0
        assert (
            json.loads((tmp_path / "out" / "eval" / "scores.json").read_text())["metrics"]
            == result["metrics"]["pruned"]
        )


def test_what_a_kill_at_the_very_end_left_is_made_up_for(command, sst2, tmp_path):
    flags = ["prune", *sst2, *SHORT, "--output", "out", "--target-size", "1MB"]
    assert command(*flags)[0] == 0
    shutil.rmtree(tmp_path / "out" / "export")
    (tmp_path / "out" / "checkpoints" / "checkpoint-12").mkdir(parents=True)
    assert command("prune", "--resume", "out")[0] == 0
    assert (tmp_path / "out" / "export" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert "nothing to resume" in complaint(command("prune", "--resume", "out"))


def test_a_kill_at_the_very_start_leaves_nothing_in_the_way(command, sst2, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".config.yaml.new").write_text("run:")
    assert command("prune", *sst2, *SHORT, "--output", "out")[0] == 0


def test_tensorboard_logs_stay(command, sst2, tmp_path):
    assert command("prune", *sst2, *SHORT, "--output", "out", "--report-to", "tensorboard")[0] == 0
    assert list((tmp_path / "out" / "tensorboard").glob("events*"))
