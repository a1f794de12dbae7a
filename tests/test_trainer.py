"""PinsTrainer and PruningCallback in a real Trainer: gradients, sparsity, checkpoints, objectives, signals, DDP."""

from __future__ import annotations

import json
import math
import os
import signal
import socket

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
import transformers
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch.nn.utils import parametrize
from transformers import PreTrainedTokenizerFast, PrinterCallback, Trainer, TrainerCallback

import tiny_models
import tiny_sharded
from pinscher import PruningConfig, checkpoint
from pinscher.errors import InputError
from pinscher.prune import CRITERIA, find_sites
from pinscher.prune.gates import gate_of
from pinscher.train.callback import PruningCallback
from pinscher.train.stopping import Stopping
from pinscher.train.trainer import PinsTrainer
from tiny_models import DROPOUT, HEADS, Head

LEARNED = ("movement", "smvp", "l0", "pst")
EXTRA = {
    "masked-lm": Head("tokens", "BertForMaskedLM", "BertConfig", tiny_models.BERT),
    "mixtral": Head("causal-lm", "MixtralForCausalLM", "MixtralConfig", {**tiny_models.LLAMA, "num_local_experts": 2}),
}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True}
SAVING = {"save_strategy": "steps", "save_steps": 3}


def trainer_for(folder, head="bert", *, cls=PinsTrainer, args=None, model=None, data=None, options=None, **more):
    """A trainer of this head on its rows; `args` are for TrainingArguments, `options` for the model."""
    head = (HEADS | EXTRA)[head]
    settings = {"per_device_train_batch_size": 4, "max_steps": 12} | (args or {})
    if settings["max_steps"] is None:
        del settings["max_steps"]
    trainer = cls(
        model=head.make(**(options or {})) if model is None else model,
        args=tiny_models.arguments(folder, **settings),
        train_dataset=tiny_models.rows(head.kind) if data is None else data,
        **{"eval_dataset": tiny_models.rows(head.kind, 8, seed=2), "data_collator": tiny_models.collator(head.kind)}
        | more,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def pruning(method="pins", sparsity=0.8, interval=2, **settings):
    options = {"batches": 3} if method == "snip" else {}
    return PruningConfig(method=method, sparsity=sparsity, interval=interval, options=options, **settings)


def zeros(model):
    return sum(int((site.effective == 0).sum()) for site in find_sites(model))


def wanted_zeros(model, sparsity=0.8):
    total = sum(site.numel for site in find_sites(model))
    return total - math.floor((1 - sparsity) * total + 0.5)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def copied(state):
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def logged(trainer, name):
    """The values of a figure by step."""
    return {line["step"]: line[name] for line in trainer.state.log_history if name in line}


class Spy(TrainerCallback):
    """Calls a function at an event: Spy(on_step_end=lambda state, model: ...)."""

    def __init__(self, **hooks):
        for event, hook in hooks.items():
            setattr(self, event, lambda args, state, control, hook=hook, **seen: hook(state, seen))


# ------------------------------------------------------------ gradient accumulation


def gradients(head, batch, steps, *, cls=PinsTrainer, folder="unused", data=None, args=None, **more):
    """The gradients of every optimiser step of an epoch, the model staying as it is, and the logged losses."""
    seen = []

    def look(state, found):
        parameters = found["model"].named_parameters()
        seen.append({name: p.grad.clone() for name, p in parameters if p.grad is not None})

    still = {"max_steps": None, "num_train_epochs": 1, "learning_rate": 0.0, "weight_decay": 0.0, "max_grad_norm": 0.0}
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps}
    trainer = trainer_for(
        folder,
        head,
        cls=cls,
        model=(HEADS | EXTRA)[head].make().double(),
        data=tiny_models.rows((HEADS | EXTRA)[head].kind, 11) if data is None else data,  # 11 rows: a ragged last step
        args=still | sizes | (args or {}),
        callbacks=[Spy(on_pre_optimizer_step=look)],
        **more,
    )
    trainer.train()
    return seen, trainer


def distance(one, other):
    """The largest difference between gradients, relative to the largest gradient, over all steps."""
    assert len(one) == len(other) > 0
    found = 0.0
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        size = max(float(g.abs().max()) for g in a.values())
        assert size > 1e-4
        found = max(found, *(float((a[name] - b[name]).abs().max()) / size for name in a))
    return found


@pytest.fixture
def double_losses(monkeypatch):
    """Losses that upcast to float32 stay in float64, so that rounding hides nothing."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.usefixtures("double_losses")
def test_accumulation_gives_the_gradient_of_the_big_batch(head, tmp_path):
    big, small = (gradients(head, *sizes, folder=tmp_path, objective="empirical-risk")[0] for sizes in ((8, 1), (2, 4)))
    assert len(big) == 2  # 8 rows, and 3
    assert distance(big, small) < 1e-10


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.usefixtures("double_losses")
def test_accumulation_with_a_teacher_and_label_smoothing(head, tmp_path):
    kind = HEADS[head].kind
    smoothing = 0.0 if kind in ("regression", "spans") else 0.1  # the Trainer smooths `labels` that are classes
    found = []
    for sizes in ((8, 1), (2, 4)):
        more = {"objective": "knowledge-distillation", "teacher": HEADS[head].make(seed=7).double()}
        args = {"label_smoothing_factor": smoothing}
        seen, trainer = gradients(head, *sizes, folder=tmp_path, args=args, **more)
        assert min(logged(trainer, "loss_sr").values()) > 1e-4
        found.append(seen)
    # LabelSmoother adds up in float32, whatever it is given.
    assert distance(*found) < (1e-6 if smoothing else 1e-10)


def test_accumulation_in_the_stock_trainer_is_wrong(tmp_path):
    """Otherwise the tests above would test nothing."""
    big, small = (gradients("bert", *sizes, cls=Trainer, folder=tmp_path)[0] for sizes in ((8, 1), (2, 4)))
    for a, b in zip(big[0].values(), small[0].values(), strict=True):
        torch.testing.assert_close(4 * a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("double_losses")
def test_accumulation_through_a_whole_run(tmp_path):
    """Pruned, self-regularised, with ragged groups: the same masks, and the same weights but for rounding."""
    states = []
    for batch, steps in ((8, 1), (2, 4)):
        args = EVALUATING | {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps}
        data = tiny_models.rows("classes", 21)
        model = HEADS["bert"].make().double()
        trainer = trainer_for(tmp_path, args=args, model=model, data=data, pruning=pruning())
        trainer.train()
        assert trainer.teacher.changes > 1
        states.append(trainer.model.state_dict())
    for name in states[0]:
        assert torch.equal(states[0][name] == 0, states[1][name] == 0)
        torch.testing.assert_close(states[0][name], states[1][name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("head", ["tokens", "gpt2-lm"])
@pytest.mark.usefixtures("double_losses")
def test_micro_batches_in_which_nothing_counts(head, smoothing, tmp_path):
    rows = tiny_models.rows(HEADS[head].kind, 8).to_list()
    rows = [row | {"labels": [-100] * len(row["labels"])} if i % 2 else row for i, row in enumerate(rows)]
    found = []
    for sizes in ((8, 1), (1, 8)):
        args = {"label_smoothing_factor": smoothing}
        more = {"objective": "knowledge-distillation", "teacher": HEADS[head].make(seed=7).double()}
        found.append(gradients(head, *sizes, folder=tmp_path, data=Dataset.from_list(rows), args=args, **more))
    (big, first), (small, second) = found
    assert distance(big, small) < (1e-6 if smoothing else 1e-10)
    assert logged(second, "loss")[1] == pytest.approx(logged(first, "loss")[1], rel=1e-5)
    assert math.isfinite(logged(second, "loss_er")[1])


def test_a_step_in_which_nothing_counts_changes_nothing(tmp_path):
    rows = [row | {"labels": [-100] * len(row["labels"])} for row in tiny_models.rows("tokens", 8).to_list()]
    seen, trainer = gradients("tokens", 2, 2, folder=tmp_path, data=Dataset.from_list(rows), objective="empirical-risk")
    assert all(not g.any() for step in seen for g in step.values())
    assert all(math.isfinite(value) for value in logged(trainer, "loss").values())


def collate_multi_label(features):
    rows = [{name: value for name, value in row.items() if name != "labels"} for row in features]
    return tiny_models.collate(rows) | {"labels": torch.tensor([row["labels"] for row in features])}


@pytest.mark.parametrize("head", [*HEADS, "masked-lm", "multi-label"])
def test_the_validation_loss_is_the_models_own(head, tmp_path):
    """The mean over batches by their rows, as the Trainer's loop takes it."""
    more = {}
    if head == "multi-label":
        rows = tiny_models.rows("regression", 8).to_list()
        rows = [row | {"labels": [1.0, 0.0, float(round(row["labels"]))]} for row in rows]
        head, more = "bert", {"eval_dataset": rows, "data_collator": collate_multi_label}
        more["options"] = {"problem_type": "multi_label_classification"}
    trainer = trainer_for(tmp_path, head, args={"per_device_eval_batch_size": 3}, **more)
    rows = [trainer.eval_dataset[i] for i in range(8)]
    expected = 0.0
    with torch.no_grad():
        for some in (rows[:3], rows[3:6], rows[6:]):
            expected += float(trainer.model.eval()(**trainer.data_collator(some)).loss) * len(some) / 8
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


# ------------------------------------------------------------ the order of the data


def test_the_order_that_the_arguments_ask_for_is_kept(tmp_path):
    """Sequential sampling is the Trainer's own; random and by length are ours, the same after a resume."""
    order = {
        strategy: list(trainer_for(tmp_path, args={"train_sampling_strategy": strategy})._get_train_sampler())
        for strategy in ("sequential", "random")
    }
    assert order["sequential"] == list(range(len(order["random"])))
    assert sorted(order["random"]) == order["sequential"] != order["random"]


# ------------------------------------------------------------ every method, every head


@pytest.mark.parametrize("method", list(CRITERIA))
def test_every_criterion_ends_as_an_ordinary_sparse_model(method, tmp_path):
    trainer = trainer_for(tmp_path, args=EVALUATING, options=DROPOUT, pruning=pruning(method))
    before = copied(trainer.model.state_dict())
    trainer.train()
    model = trainer.model
    assert zeros(model) == wanted_zeros(model)
    assert not any(parametrize.is_parametrized(module) for module in model.modules())
    assert model.state_dict().keys() == before.keys()
    assert not same(model.state_dict(), before)
    trainer.save_model(tmp_path / "saved")
    again, info = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(again.state_dict(), model.state_dict())
    assert zeros(again) == wanted_zeros(model)
    assert logged(trainer, "density")[12] == pytest.approx(1 - zeros(model) / trainer.pruner.total)


@pytest.mark.parametrize("head", [*HEADS, "mixtral"])
def test_every_head_prunes_and_resumes(head, tmp_path):
    """Mixtral is stored under other names than its parameters have."""
    head_made = (HEADS | EXTRA)[head]
    head_made.make().save_pretrained(tmp_path / "start")
    states = []
    for resume in (None, str(tmp_path / "run" / "checkpoint-3")):
        model = getattr(transformers, head_made.model).from_pretrained(tmp_path / "start")
        folder = tmp_path / ("resumed" if resume else "run")
        args = EVALUATING | SAVING | {"max_steps": 6}
        trainer = trainer_for(folder, head, model=model, args=args, pruning=pruning(sparsity=0.5))
        trainer.train(resume)
        assert zeros(trainer.model) == wanted_zeros(trainer.model, 0.5)
        states.append(trainer.model.state_dict())
    assert same(*states)


def test_a_dense_run_prunes_nothing(tmp_path):
    trainer = trainer_for(tmp_path, args=SAVING, objective="empirical-risk")
    trainer.train()
    assert trainer.pruner is None
    assert zeros(trainer.model) == 0
    trainer.train()  # and may be trained again


# ------------------------------------------------------------ learned masks


@pytest.mark.parametrize("method", LEARNED)
def test_gates_have_a_group_of_their_own(method, tmp_path):
    seen = {}

    def look(state, found):
        gates = [p for site in trainer.pruner.sites for p in gate_of(site).parameters() if p.requires_grad]
        originals = [site.owner for site in trainer.pruner.sites]
        seen.update(groups=found["optimizer"].param_groups, gates=gates, originals=originals)

    args = {"learning_rate": 1e-3, "weight_decay": 0.25}
    trainer = trainer_for(tmp_path, args=args, pruning=pruning(method), callbacks=[Spy(on_train_begin=look)])
    trainer.train()
    *others, last = seen["groups"]
    assert {id(p) for p in last["params"]} == {id(p) for p in seen["gates"]}
    assert last["initial_lr"] == CRITERIA[method]().score_lr
    assert last["weight_decay"] == 0.0
    rest = {id(p): group for group in others for p in group["params"]}
    assert not rest.keys() & {id(p) for p in seen["gates"]}
    assert all(group["initial_lr"] == 1e-3 for group in others)
    for original in seen["originals"]:  # weights below the gates train like any other, but for PST's, which are frozen
        assert (id(original) in rest) == (method != "pst")
        assert method == "pst" or rest[id(original)]["weight_decay"] == 0.25


@pytest.mark.parametrize("method", LEARNED)
def test_a_checkpoint_of_learned_masks_is_an_ordinary_model(method, tmp_path):
    """With the very weights that the model has at test time, in the middle of the run."""
    seen = {}

    def look(state, found):
        if state.global_step == 6:
            seen.update({f"{site.name}.weight": site.settled.clone() for site in trainer.pruner.sites})

    trainer = trainer_for(
        tmp_path, args=SAVING, options=DROPOUT, pruning=pruning(method, hold="always"), callbacks=[Spy(on_save=look)]
    )
    trainer.train()
    folder = tmp_path / "checkpoint-6"
    model, info = type(trainer.model).from_pretrained(folder, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert load_file(folder / "model.safetensors").keys() == HEADS["bert"].make().state_dict().keys()
    stored = model.state_dict()
    assert seen
    assert all(torch.equal(stored[name], tensor) for name, tensor in seen.items())
    assert 0.5 < zeros(model) / trainer.pruner.total < 0.8


# ------------------------------------------------------------ checkpoints

RESUMED = ("pins", "smvp", "l0", "pst", "movement", "magnitude")
FILES = ("model.safetensors", checkpoint.TENSORS, checkpoint.VALUES)


def resumable(folder, method="pins", grouped=False, seed=0, args=None, **more):
    """22 rows, 2 a micro-batch, 2 micro-batches a step: 6 steps an epoch, of which the last is ragged."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 15}
    strategy = {"train_sampling_strategy": "group_by_length" if grouped else "random"}
    return trainer_for(
        folder,
        model=HEADS["bert"].make(seed, **DROPOUT),
        data=tiny_models.rows("classes", 22),
        args=EVALUATING | SAVING | sizes | strategy | (args or {}),
        **{"pruning": pruning(method)} | more,
    )


def contents(folder):
    """Weights, optimiser, pruner, teacher, random numbers: all that a checkpoint holds, as bytes."""
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A whole run of `resumable`: its folder and its last weights."""
    folder = tmp_path_factory.mktemp("unbroken")
    trainer = resumable(folder)
    trainer.train()
    return folder, copied(trainer.model.state_dict())


@pytest.mark.parametrize("grouped", [False, True], ids=["random", "grouped"])
@pytest.mark.parametrize("method", RESUMED)
def test_a_resumed_run_is_bit_identical(method, grouped, tmp_path):
    whole = resumable(tmp_path / "whole", method, grouped)
    whole.train()
    assert whole.teacher.changes > 1
    for step in (6, 9):  # the end of an epoch, and the middle of one
        folder = tmp_path / f"from-{step}"
        resumed = resumable(folder, method, grouped, seed=5)  # nothing of a new model may remain
        resumed.train(str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert same(resumed.model.state_dict(), whole.model.state_dict())
        assert contents(folder / "checkpoint-15") == contents(tmp_path / "whole" / "checkpoint-15")
        assert logged(resumed, "eval_loss") == logged(whole, "eval_loss")


def test_a_resumed_distillation_is_bit_identical(tmp_path):
    states = []
    for folder, resume in (("whole", None), ("resumed", str(tmp_path / "whole" / "checkpoint-9"))):
        more = {"objective": "knowledge-distillation", "teacher": HEADS["bert"].make(seed=7, **DROPOUT)}
        trainer = resumable(tmp_path / folder, **more)
        trainer.train(resume)
        states.append(contents(tmp_path / folder / "checkpoint-15"))
    assert states[0] == states[1]


def tiny_tokenizer():
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "word": 2}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


@pytest.mark.parametrize("method", ["pins", "l0"])
def test_a_checkpoint_holds_no_pickle(method, tmp_path):
    trainer = resumable(tmp_path, method, args={"max_steps": 6}, processing_class=tiny_tokenizer(), select="best")
    trainer.train()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == {"checkpoint-3", "checkpoint-6", "best"}
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            load_file(path)
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "checkpoint-3").pad_token == "[PAD]"


class Crash(BaseException):
    """What no handler of ours may swallow."""


@pytest.mark.parametrize("place", ["save_file", "_sync", "write"])
def test_a_checkpoint_is_whole_or_not_there(place, unbroken, tmp_path, monkeypatch):
    trainer = resumable(tmp_path / "run")
    real = getattr(checkpoint, place)

    def crash(*args, **kwargs):
        if trainer.state.global_step == 9:
            raise Crash
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, place, crash)
        with pytest.raises(Crash):
            trainer.train()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-3", "checkpoint-6"]
    assert contents(tmp_path / "run" / "checkpoint-6") == contents(unbroken[0] / "checkpoint-6")
    leftover = tmp_path / "run" / ".checkpoint-9.new"  # what a kill would leave
    leftover.mkdir()
    (leftover / "junk").write_text("half")

    resumed = resumable(tmp_path / "run", seed=5)
    resumed.train(resume_from_checkpoint=True)
    assert contents(tmp_path / "run" / "checkpoint-15") == contents(unbroken[0] / "checkpoint-15")
    assert not list((tmp_path / "run").glob(".*"))


def test_only_so_many_checkpoints_are_kept(tmp_path):
    trainer = resumable(tmp_path, args={"save_total_limit": 2})
    trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-12", "checkpoint-15"]


def test_another_models_checkpoint_is_refused(tmp_path):
    resumable(tmp_path / "one", args={"max_steps": 3}, pruning=pruning(interval=1)).train()
    other = trainer_for(tmp_path / "two", "tokens", args={"max_steps": 6}, pruning=pruning())
    with pytest.raises((InputError, ValueError, RuntimeError)):
        other.train(str(tmp_path / "one" / "checkpoint-3"))


# ------------------------------------------------------------ objectives


def scripted(scores, seen=None):
    """A `validate` that gives these scores one after the other, and shows the trainer's model to `seen`."""
    left = list(scores)

    def validate(model):
        score = left.pop(0)
        if seen is not None:
            seen(score, model)
        return {"score": score}

    return validate


SCORED = {"metric_for_best_model": "score", "greater_is_better": True}


def test_empirical_risk_has_no_teacher(tmp_path):
    trainer = trainer_for(tmp_path, args=EVALUATING, pruning=pruning(), objective="empirical-risk")
    trainer.train()
    assert not trainer.teacher.ready
    assert trainer.teacher.snapshot is None
    assert not logged(trainer, "loss_sr")
    assert not logged(trainer, "teacher_score")
    assert logged(trainer, "loss_er") == pytest.approx(logged(trainer, "loss"), rel=1e-5)


def test_distillation_listens_to_the_given_teacher_and_leaves_it_alone(tmp_path):
    teacher = HEADS["bert"].make(seed=7, **DROPOUT)
    before = copied(teacher.state_dict())
    data = tiny_models.rows("classes")
    batch = tiny_models.collate(data.to_list())
    student = HEADS["bert"].make()
    with torch.no_grad():
        mine, its = (F.log_softmax(model.eval()(**batch).logits, -1) for model in (student, teacher))
    expected = float(F.kl_div(mine, its, reduction="batchmean", log_target=True))
    trainer = trainer_for(
        *(tmp_path, "bert"),
        model=student,
        data=data,
        args=EVALUATING | {"per_device_train_batch_size": len(data)},
        pruning=pruning(),
        objective="knowledge-distillation",
        teacher=teacher.train(),
    )
    trainer.train()
    assert logged(trainer, "loss_sr")[1] == pytest.approx(expected, rel=1e-5)
    assert len(logged(trainer, "loss_sr")) == 12
    assert same(teacher.state_dict(), before)
    assert all(p.grad is None for p in teacher.parameters())
    assert not logged(trainer, "teacher_score")
    assert not [name for name, _ in trainer.model.named_parameters() if "teacher" in name]


def test_self_regularisation_takes_the_first_student_and_then_better_ones(tmp_path):
    trainer = trainer_for(
        tmp_path, args=EVALUATING | SCORED, pruning=pruning(), validate=scripted([0.5, 0.4, 0.6, 0.6, float("nan")])
    )
    trainer.train()
    assert logged(trainer, "teacher_score") == {0: 0.5, 6: 0.6}
    assert logged(trainer, "teacher_changes") == {0: 1, 6: 2}
    assert trainer.teacher.best == 0.6
    terms, errors, losses = (logged(trainer, name) for name in ("loss_sr", "loss_er", "loss"))
    assert terms.keys() == errors.keys() == losses.keys() == set(range(1, 13))
    assert terms[1] < 1e-6 < terms[2]  # at first student and teacher are one
    assert terms[7] < min(terms[6], terms[8])  # and again after the change
    for step in losses:
        assert losses[step] == pytest.approx(errors[step] + terms[step], rel=1e-5)


@pytest.mark.parametrize(("start", "first"), [(0.0, 0), (0.25, 3), (4, 6), (0.3, 6)])
def test_the_teacher_may_start_later(tmp_path, start, first):
    """Twelve steps, an evaluation every three."""
    falling = scripted([0.9, 0.8, 0.7, 0.6, 0.5])
    trainer = trainer_for(tmp_path, args=EVALUATING | SCORED, pruning=pruning(), validate=falling, teacher_start=start)
    trainer.train()
    assert list(logged(trainer, "teacher_score")) == [first]
    assert min(logged(trainer, "loss_sr")) == first + 1


def test_a_teacher_with_too_many_weights_gives_way(tmp_path):
    falling = scripted([0.9, 0.8, 0.7, 0.6, 0.5])
    trainer = trainer_for(tmp_path, args=EVALUATING | SCORED, pruning=pruning(), validate=falling, teacher_lag=1.2)
    trainer.train()
    found = logged(trainer, "teacher_score")
    density = {0: 1.0} | logged(trainer, "density")
    teacher, expected = 0, [0]
    for step in (3, 6, 9, 12):
        if density[teacher] > 1.2 * density[step]:
            teacher = step
            expected.append(step)
    assert list(found) == expected
    assert len(found) > 2


def test_a_run_with_a_lag_resumes_bit_by_bit(tmp_path):
    more = {"teacher_start": 0.2, "teacher_lag": 1.1}
    whole = resumable(tmp_path / "whole", **more)
    whole.train()
    resumed = resumable(tmp_path / "resumed", seed=5, **more)
    resumed.train(str(tmp_path / "whole" / "checkpoint-9"))
    assert contents(tmp_path / "resumed" / "checkpoint-15") == contents(tmp_path / "whole" / "checkpoint-15")
    assert resumed.teacher.density == whole.teacher.density < 1


@pytest.mark.parametrize("lag", [0.9, float("nan")])
def test_a_lag_below_one(tmp_path, lag):
    with pytest.raises(InputError, match="teacher_lag must be at least 1"):
        trainer_for(tmp_path, pruning=pruning(), teacher_lag=lag)


@pytest.mark.parametrize("start", [-1, float("nan")])
def test_a_start_that_is_no_number_of_steps(tmp_path, start):
    with pytest.raises(InputError, match="teacher_start is a number of steps"):
        trainer_for(tmp_path, pruning=pruning(), teacher_start=start)


def test_a_lower_loss_is_better_by_default(tmp_path):
    trainer = trainer_for(tmp_path, args=EVALUATING, pruning=pruning())
    trainer.train()
    found = logged(trainer, "teacher_score")
    losses = list(logged(trainer, "eval_loss").values())
    assert list(found.values()) == [loss for i, loss in enumerate(losses) if loss < min(losses[:i], default=math.inf)]
    assert len(found) > 1


def test_without_an_evaluation_at_the_start_the_teacher_comes_later(tmp_path):
    trainer = trainer_for(tmp_path, args=EVALUATING | {"eval_on_start": False}, pruning=pruning())
    trainer.train()
    assert min(logged(trainer, "loss_sr")) == 4


@pytest.mark.parametrize("head", ["bert", "tokens", "spans", "gpt2-lm", "t5"])
def test_the_entropy_mix_runs(head, tmp_path):
    trainer = trainer_for(tmp_path, head, args=EVALUATING, pruning=pruning(), mix="entropy")
    trainer.train()
    assert trainer.teacher.temperature == 2.0
    assert all(math.isfinite(value) for value in logged(trainer, "loss_sr").values())
    assert zeros(trainer.model) == wanted_zeros(trainer.model)


# ------------------------------------------------------------ which model is the result

EVERY_STEP = EVALUATING | SCORED | {"eval_steps": 1, "max_steps": 20}
HALF = 1 - 818.5 / 4096  # keeps 818.5 weights of 4096: whether that is 818 or 819 must be one thing everywhere


def selected(folder, scores, method="pins", sparsity=0.8):
    """Runs with select="best"; gives the trainer and (score, zeros, weights) of every evaluation."""
    seen = []

    def look(score, model):
        state = copied(trainer.pruner.model_state_dict())
        number = sum(int((state[f"{site.name}.weight"] == 0).sum()) for site in trainer.pruner.sites)
        seen.append((score, number, state))

    trainer = trainer_for(
        folder,
        args=EVERY_STEP,
        options=DROPOUT,
        pruning=pruning(method, sparsity),
        validate=scripted(scores, look),
        select="best",
    )
    trainer.train()
    assert len(seen) == 21
    return trainer, seen


SCORES = {
    "falling": [100.0 - i for i in range(21)],
    "peak": [90.0] * 12 + [50.0, 51.0, 52.0, 57.0, 53.0, 52.0, 57.0, 51.0, 50.0],
    "rising": [float(i) for i in range(21)],
}


@pytest.mark.parametrize("sparsity", [0.8, HALF])
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("method", ["pins", "magnitude", "movement"])
def test_best_is_the_best_of_those_at_the_target(method, scores, sparsity, tmp_path):
    trainer, seen = selected(tmp_path, scores, method, sparsity)
    target = wanted_zeros(trainer.model, sparsity)
    assert seen[0][1] == 0
    assert seen[0][0] > seen[-1][0] or scores == SCORES["rising"]  # the dense start would have been the better one
    there = [entry for entry in seen if entry[1] == target]
    assert len(there) == 8  # the cool-down is the last 35 %
    best = max(there, key=lambda entry: entry[0])  # the first of them, if there are several
    assert trainer.best == best[0]
    assert zeros(trainer.model) == target
    assert same(trainer.model.state_dict(), best[2])


@pytest.mark.parametrize("method", ["smvp", "l0", "pst", "snip", "magnitude-oneshot"])
def test_best_has_the_target_sparsity_for_every_method(method, tmp_path):
    trainer, seen = selected(tmp_path, SCORES["falling"], method)
    target = wanted_zeros(trainer.model)
    assert trainer.best == max(score for score, number, _ in seen if number == target)
    assert zeros(trainer.model) == target


def test_best_survives_a_resume(tmp_path):
    scores = SCORES["peak"]
    one, _ = selected(tmp_path / "whole", scores)
    args = EVERY_STEP | SAVING | {"save_steps": 17}
    more = {"options": DROPOUT, "pruning": pruning(), "select": "best"}
    first = trainer_for(tmp_path / "run", args=args, validate=scripted(scores), **more)
    first.train()
    second = trainer_for(tmp_path / "run", args=args, validate=scripted(scores[18:]), **more)
    second.train(True)
    assert first.best == second.best == one.best == 57.0
    assert same(second.model.state_dict(), one.model.state_dict())


def test_final_is_the_last_model(tmp_path):
    last = {}
    trainer = trainer_for(
        tmp_path,
        args=EVERY_STEP,
        pruning=pruning(),
        validate=scripted(SCORES["falling"], lambda score, model: last.update(copied(model.state_dict()))),
    )
    trainer.train()
    assert same(trainer.model.state_dict(), last)
    assert not (tmp_path / "best").exists()


# ------------------------------------------------------------ what is refused


def test_load_best_model_at_end_is_refused(tmp_path):
    args = EVALUATING | SAVING | {"load_best_model_at_end": True}
    with pytest.raises(InputError, match='select="best"'):
        trainer_for(tmp_path, args=args, pruning=pruning())


def test_an_unknown_selection_is_refused(tmp_path):
    with pytest.raises(InputError, match="final, best"):
        trainer_for(tmp_path, pruning=pruning(), select="last")


def test_a_schedule_of_another_length_is_refused(tmp_path):
    trainer = trainer_for(tmp_path, pruning=pruning(total_steps=20))
    with pytest.raises(InputError, match="20 steps but this run has 12"):
        trainer.train()
    trainer_for(tmp_path, pruning=pruning(total_steps=12)).train()


def test_training_a_finished_model_again_is_refused(tmp_path):
    trainer = trainer_for(tmp_path, pruning=pruning())
    trainer.train()
    before = copied(trainer.model.state_dict())
    with pytest.raises(InputError, match="new PinsTrainer"):
        trainer.train()
    assert same(trainer.model.state_dict(), before)


@pytest.mark.parametrize("engine", ["is_deepspeed_enabled", "is_fsdp_enabled"])
def test_deepspeed_and_fsdp_are_refused(engine, tmp_path, monkeypatch):
    """Neither can be had on one CPU: the Trainer is told that it has it."""
    real = Trainer.create_accelerator_and_postprocess

    def pretend(self):
        real(self)
        setattr(self, engine, True)

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", pretend)
    with pytest.raises(InputError, match="not under DeepSpeed, and not with the Trainer's own fsdp"):
        trainer_for(tmp_path, pruning=pruning())


# ------------------------------------------------------------ the callback


def with_callback(folder, method="pins", args=None, seed=0, config=None):
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 15}
    return trainer_for(
        folder,
        cls=Trainer,
        model=HEADS["bert"].make(seed, **DROPOUT),
        data=tiny_models.rows("classes", 22),
        args=sizes | (args or {}),
        callbacks=[PruningCallback(config or pruning(method))],
    )


@pytest.mark.parametrize("method", [name for name in CRITERIA if name not in LEARNED])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_callback_prunes_in_any_trainer(method, accumulation, tmp_path):
    trainer = with_callback(tmp_path, method, {"gradient_accumulation_steps": accumulation, "max_steps": 12})
    trainer.train()
    assert zeros(trainer.model) == wanted_zeros(trainer.model)
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, PruningCallback))
    assert callback.pruner.finished
    assert callback.pruner.t == 12  # optimiser steps, not micro-batches


@pytest.mark.parametrize("method", ["pins", "magnitude"])
def test_the_callback_resumes_bit_identically(method, tmp_path):
    whole = with_callback(tmp_path / "run", method, SAVING)
    whole.train()
    wanted = copied(whole.model.state_dict())
    pruned = checkpoint.load(tmp_path / "run" / "checkpoint-15" / "pruner")
    for step in (6, 9):
        resumed = with_callback(tmp_path / "run", method, SAVING, seed=5)
        resumed.train(str(tmp_path / "run" / f"checkpoint-{step}"))
        assert same(resumed.model.state_dict(), wanted)
        again = checkpoint.load(tmp_path / "run" / "checkpoint-15" / "pruner")
        assert repr(again) == repr(pruned)


def test_the_callback_resumes_from_output_dir_only(tmp_path):
    with_callback(tmp_path / "one", args=SAVING).train()
    elsewhere = with_callback(tmp_path / "two", args=SAVING)
    with pytest.raises(InputError, match="Resume from a checkpoint in output_dir"):
        elsewhere.train(str(tmp_path / "one" / "checkpoint-6"))


@pytest.mark.parametrize("method", LEARNED)
def test_the_callback_refuses_learned_masks(method):
    with pytest.raises(InputError, match=rf"'{method}' learns its masks.*use PinsTrainer"):
        PruningCallback(pruning(method))


def test_the_callback_refuses_load_best_model_at_end(tmp_path):
    trainer = with_callback(tmp_path, args=EVALUATING | SAVING | {"load_best_model_at_end": True})
    with pytest.raises(InputError, match="load_best_model_at_end"):
        trainer.train()


# ------------------------------------------------------------ precision, compilation


@pytest.mark.parametrize("method", ["pins", "smvp"])
def test_bf16_keeps_the_weights_in_fp32(method, tmp_path):
    seen = set()

    def look(state, found):
        seen.update(p.grad.dtype for p in found["model"].parameters() if p.requires_grad)

    spy = Spy(on_pre_optimizer_step=look)
    trainer = trainer_for(tmp_path, args=EVALUATING | {"bf16": True}, pruning=pruning(method), callbacks=[spy])
    logits = []
    trainer.model.classifier.register_forward_hook(lambda module, inputs, output: logits.append(output.dtype))
    trainer.train()
    assert torch.bfloat16 in logits  # it is what it says
    assert {p.dtype for p in trainer.model.parameters()} == seen == {torch.float32}
    assert zeros(trainer.model) == wanted_zeros(trainer.model)
    assert all(math.isfinite(value) for value in logged(trainer, "loss").values())


def test_a_compiled_model_is_pruned_the_same(tmp_path):
    """Dynamo and AOT autograd; generating C++ on top of it takes inductor most of a minute here."""
    rows = [row for row in tiny_models.rows("classes", 200).to_list() if len(row["input_ids"]) == 8][:8]
    states = []
    for compiling in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        args = EVALUATING | SAVING | {"max_steps": 4, "eval_steps": 2, "save_steps": 2} | compiling
        trainer = trainer_for(
            tmp_path, args=args, data=rows, eval_dataset=rows, pruning=pruning(interval=1, sparsity=0.5, cooldown=1)
        )
        trainer.train()
        assert (type(trainer.model_wrapped).__name__ == "OptimizedModule") == bool(compiling)
        assert trainer.teacher.changes > 1
        assert zeros(trainer.model) == wanted_zeros(trainer.model, 0.5)
        type(trainer.model).from_pretrained(tmp_path / "checkpoint-4")
        states.append(trainer.model.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------ signals


def interrupted(folder, number, step, args=None, times=1):
    """Sends this process a signal while the given step is computed."""
    stopping = Stopping()

    def send(state, found):
        if state.global_step == step - 1:
            for _ in range(times):
                os.kill(os.getpid(), number)

    trainer = resumable(folder, args=args, callbacks=[stopping, Spy(on_pre_optimizer_step=send)])
    with stopping.listening():
        trainer.train()
    return trainer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [4, 6, 9])  # between two checkpoints, at the end of an epoch, at a checkpoint
def test_a_signal_saves_and_stops_and_the_resumed_run_is_bit_identical(number, step, unbroken, tmp_path):
    before = signal.getsignal(number)
    stopped = interrupted(tmp_path / "run", number, step)
    assert stopped.state.global_step == step
    assert not stopped.pruner.finished
    assert max(int(path.name.split("-")[1]) for path in (tmp_path / "run").iterdir()) == step
    assert signal.getsignal(number) is before
    resumed = resumable(tmp_path / "run", seed=5)
    resumed.train(True)
    assert same(resumed.model.state_dict(), unbroken[1])
    assert contents(tmp_path / "run" / "checkpoint-15") == contents(unbroken[0] / "checkpoint-15")


def test_a_signal_in_the_last_step_changes_nothing(tmp_path):
    trainer = interrupted(tmp_path, signal.SIGTERM, 15)
    assert trainer.pruner.finished
    assert zeros(trainer.model) == wanted_zeros(trainer.model)


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path, signal.SIGINT, 4, times=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3"]


# ------------------------------------------------------------ DDP

LIMIT = 150  # seconds; processes that wait for each other would wait for ever
DDP = {
    "pins": {"head": "bert"},
    "movement": {"head": "bert", "method": "movement"},
    "tokens": {"head": "tokens"},  # an uneven number of labels on each process
    "best": {"head": "bert", "select": "best"},
    "dropout": {"head": "bert", "options": DROPOUT},
}


def ddp_trainer(folder, processes, head, method="pins", select="final", options=None):
    sizes = {"per_device_train_batch_size": 4 // processes, "gradient_accumulation_steps": 2, "max_steps": 10}
    saving = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
        "save_strategy": "steps",
        "save_steps": 5,
    }
    return trainer_for(
        folder,
        head,
        model=HEADS[head].make(**(options or {})).double(),
        args=saving | sizes | ({"ddp_backend": "gloo"} if processes > 1 else {}),
        pruning=pruning(method),
        select=select,
    )


def rank_main(rank, port, folder):
    """All cases in one go: a process takes longer to import than to train."""
    tiny_models.become_rank(rank, port, LIMIT)
    runs = [(name, None) for name in DDP] + [("dropout", str(folder / "dropout" / "0" / "checkpoint-5"))]
    for name, resume in runs:
        shared = name == "best"  # every process reads what the first one wrote
        place = folder / (f"{name}-resumed" if resume else name) / ("both" if shared else str(rank))
        trainer = ddp_trainer(place, 2, **DDP[name])
        assert trainer.args.world_size == 2
        trainer.train(resume)
        assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
        state = {"model": trainer.model.state_dict(), "changes": trainer.teacher.changes, "best": trainer.best}
        losses = {f"{step}": loss for step, loss in logged(trainer, "eval_loss").items()}
        checkpoint.save(folder / "ends" / f"{place.parent.name}-{rank}", losses=losses, **state)
    tiny_sharded.leave()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, (port, folder), nprocs=2)
    return folder


def ends(folder, name):
    return [checkpoint.load(folder / "ends" / f"{name}-{rank}") for rank in range(2)]


@pytest.mark.parametrize("name", [*DDP, "dropout-resumed"])
def test_both_ranks_end_the_same(two_ranks, name):
    one, other = ends(two_ranks, name)
    assert same(one["model"], other["model"])
    assert {k: v for k, v in one.items() if k != "model"} == {k: v for k, v in other.items() if k != "model"}
    assert sum(int((t == 0).sum()) for t in one["model"].values()) > 3000
    assert one["changes"] > 1


@pytest.mark.parametrize("name", ["pins", "movement", "tokens", "best"])
@pytest.mark.usefixtures("double_losses")
def test_two_ranks_equal_one_process_with_twice_the_batch(two_ranks, name, tmp_path):
    trainer = ddp_trainer(tmp_path, 1, **DDP[name])
    trainer.train()
    found = ends(two_ranks, name)[0]
    for key, tensor in trainer.model.state_dict().items():
        assert torch.equal(found["model"][key] == 0, tensor == 0)
        torch.testing.assert_close(found["model"][key], tensor, rtol=0, atol=1e-9)
    assert found["changes"] == trainer.teacher.changes
    assert found["losses"] == pytest.approx({f"{k}": v for k, v in logged(trainer, "eval_loss").items()}, rel=1e-9)
    assert (trainer.best is None) == (name != "best")
    assert found["best"] == (pytest.approx(trainer.best, rel=1e-9) if name == "best" else None)


def test_only_rank_zero_writes(two_ranks):
    for name in ("pins", "movement", "tokens", "dropout"):
        assert sorted(path.name for path in (two_ranks / name / "0").iterdir()) == ["checkpoint-10", "checkpoint-5"]
        assert not (two_ranks / name / "1").exists()


def test_a_resumed_ddp_run_is_bit_identical(two_ranks):
    whole, resumed = (ends(two_ranks, name)[0] for name in ("dropout", "dropout-resumed"))
    assert same(whole["model"], resumed["model"])
    paths = [two_ranks / name / "0" / "checkpoint-10" for name in ("dropout", "dropout-resumed")]
    assert contents(paths[0]) == contents(paths[1])
