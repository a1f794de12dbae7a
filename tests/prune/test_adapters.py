"""Fine-pruning with peft's LoRA adapters: masks hold over W + s·BA, and merging loses no zero."""

import copy
import math

import peft
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from pinscher import PinsTrainer, Pruner, PruningConfig, Teacher, sparsity
from pinscher.prune import CRITERIA, find_sites
from pinscher.prune.adapters import Effective
from pinscher.prune.calibrated import Calibrated
from pinscher.prune.fisher import Obert
from pinscher.prune.gates import Gated
from pinscher.train import checkpoint
from tiny_models import HEADS, arguments, collate, rows

RANKED = [n for n in CRITERIA if not issubclass(CRITERIA[n], Gated | Calibrated | Obert)]
TARGETS = {"bert": ["query", "value", "dense"], "gpt2-lm": ["c_attn", "c_proj", "c_fc"], "llama-lm": "all-linear"}
KEPT = {"bert": ["classifier"], "gpt2-lm": None, "llama-lm": None}
STEPS = 24


def adapted(head: str = "bert", **settings: object) -> nn.Module:
    model = HEADS[head].make()
    torch.manual_seed(1)
    how = {"target_modules": TARGETS[head], "modules_to_save": KEPT[head], "r": 4, "lora_alpha": 8} | settings
    return peft.get_peft_model(model, peft.LoraConfig(**how))


def config(method: str = "pins", **settings: object) -> PruningConfig:
    return PruningConfig(method=method, **({"sparsity": 0.7, "total_steps": STEPS, "interval": 4} | settings))


def batches(head: str) -> list[dict[str, torch.Tensor]]:
    data = rows(HEADS[head].kind)
    return [collate([data[i] for i in range(k, k + 8)]) for k in (0, 8, 16)]


def start(head: str = "bert", method: str = "pins", **settings: object):
    model = adapted(head)
    pruner = Pruner(model, config(method, **settings))
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=1e-2, weight_decay=0.01)
    pruner.attach(optimizer)
    return model, pruner, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> float:
    loss = model(**batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def logits(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch).logits


# ---------------------------------------------------------------- sites


@pytest.mark.parametrize("head", TARGETS)
def test_the_sites_are_those_of_the_plain_model(head):
    plain, wrapped = find_sites(HEADS[head].make()), find_sites(adapted(head))
    assert [s.name for s in plain] == [s.name for s in wrapped]
    assert [(s.block, s.kind, s.shape) for s in plain] == [(s.block, s.kind, s.shape) for s in wrapped]
    assert all(s.adapter is None for s in plain)
    wanted = sum("key" not in s.name for s in wrapped) if head == "bert" else len(wrapped)
    assert sum(s.adapter is not None for s in wrapped) == wanted
    assert [s.name for s in find_sites(adapted("bert"), "query")] == [
        s.name for s in find_sites(HEADS["bert"].make(), "query")
    ]


# ---------------------------------------------------------------- the run


@pytest.mark.parametrize(
    ("head", "method"), [*(("bert", m) for m in RANKED), ("gpt2-lm", "pins"), ("llama-lm", "pins")]
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_ends_as_a_plain_model_with_exact_zeros_and_the_same_outputs(head, method):
    model, pruner, optimizer = start(head, method)
    data = batches(head)
    frozen = {site.name: site.owner.detach().clone() for site in pruner.sites}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = [step(model, optimizer, data[t % 3]) for t in range(STEPS)]
    assert sum(losses[-6:]) < sum(losses[:6]) or method == "random"
    # Only adapters and the head have moved.
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert all("lora" in n or ".down." in n or ".up." in n or "modules_to_save" in n for n in moved)
    assert any("classifier" in n for n in moved) == (head == "bert")
    assert all(torch.equal(site.owner, frozen[site.name]) for site in pruner.sites)
    expected = [logits(model, batch) for batch in data]
    merged = pruner.finish()
    kept = math.floor(0.3 * pruner.total + 0.5)
    assert sum(site.zeros() for site in find_sites(merged)) == pruner.total - kept
    plain = HEADS[head].make()
    assert type(merged) is type(plain)
    assert merged.state_dict().keys() == plain.state_dict().keys()
    assert not any(parametrize.is_parametrized(module) for module in merged.modules())
    for wanted, batch in zip(expected, data, strict=True):
        torch.testing.assert_close(logits(merged, batch), wanted, rtol=1e-5, atol=1e-5)


def whole_units(pattern: str, weight: torch.Tensor) -> bool:
    """Whether zeros come as the pattern says; `weight` is [out, in]."""
    zero, (rows, columns) = weight == 0, weight.shape
    if ":" in pattern:
        n, m = map(int, pattern.split(":"))
        return bool((~zero.view(rows, columns // m, m)).sum(-1).eq(n).all())
    height, width = {"rows": (1, columns), "columns": (rows, 1)}.get(pattern) or map(int, pattern.split("x"))
    tiles = zero.view(rows // height, height, columns // width, width).transpose(1, 2).flatten(2)
    return bool((tiles.all(-1) == tiles.any(-1)).all())


@pytest.mark.parametrize("head", ["bert", "gpt2-lm"])
@pytest.mark.parametrize("pattern", ["2:4", "4x1", "1x4", "rows", "columns"])
@pytest.mark.parametrize("scope", ["global", "matrix"])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_patterns_hold_over_weight_and_adapter_together(head, pattern, scope):
    model, pruner, optimizer = start(head, pattern=pattern, scope=scope, sparsity=0.5)
    data = batches(head)
    for t in range(STEPS):
        step(model, optimizer, data[t % 3])
    expected = logits(model, data[0])
    merged = pruner.finish()
    torch.testing.assert_close(logits(merged, data[0]), expected, rtol=1e-5, atol=1e-5)
    sites = find_sites(merged)
    assert all(whole_units(pattern, site.owner.t() if site.transposed else site.owner) for site in sites)
    assert sum(site.zeros() for site in sites) == pruner.total // 2


def test_the_merged_weight_is_the_masked_sum():
    model, pruner, optimizer = start("gpt2-lm")
    data = batches("gpt2-lm")
    for t in range(STEPS):
        step(model, optimizer, data[t % 3])
    wanted = {}
    for site in pruner.sites:
        a, b = site.adapter.lora_A["default"].weight, site.adapter.lora_B["default"].weight
        assert b.any()
        update = site.adapter.scaling["default"] * (b @ a)  # s = 8 / 4
        wanted[site.name] = ((site.owner + update.t()) * pruner.mask(site.name)).detach()  # Conv1D is stored [in, out]
    pruner.finish()
    for site in pruner.sites:
        torch.testing.assert_close(site.owner.detach(), wanted[site.name], rtol=0, atol=0)


@pytest.mark.parametrize("hold", ["cooldown", "always", "never"])
def test_pruned_positions_contribute_nothing_at_any_step(hold):
    model, pruner, optimizer = start(hold=hold, cooldown=8)
    data = batches("bert")
    for t in range(STEPS):
        step(model, optimizer, data[t % 3])
        if pruner.ranking.exists:
            zeros = 0
            for site in pruner.sites:
                assert not site.effective[~pruner.mask(site.name)].any()
                zeros += site.zeros()
            assert zeros == pruner.total - pruner.kept
    assert pruner.kept == pruner.target


def test_scores_see_the_gradient_of_the_whole_matrix():
    """∂L/∂W' of every position, pruned ones too, as if the merged model were trained."""
    model, pruner, optimizer = start(method="sensitivity")
    data = batches("bert")
    for t in range(12):
        step(model, optimizer, data[t % 3])
    plain = HEADS["bert"].make()
    plain.load_state_dict(pruner.model_state_dict())
    plain.train()(**data[0]).loss.backward()
    assert pruner.kept < pruner.total
    model.train()(**data[0]).loss.backward()
    for ours, theirs in zip(pruner.sites, find_sites(plain), strict=True):
        assert ours.name == theirs.name
        torch.testing.assert_close(ours.grad, theirs.owner.grad.view(-1), rtol=1e-4, atol=1e-6)
        assert ours.owner.grad is None
    before = [site.grad.clone() for site in pruner.sites]
    model(**data[0]).loss.backward()  # a second micro-batch adds to it
    torch.testing.assert_close([site.grad for site in pruner.sites], [2 * grad for grad in before])
    optimizer.step()
    assert all(site.grad is None for site in pruner.sites)


def test_adapters_receive_the_masked_gradient():
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(HEADS["bert"].make(), peft.LoraConfig(r=2, target_modules=["query"]))
    site = next(site for site in find_sites(wrapped) if site.adapter is not None)
    nn.init.normal_(site.adapter.lora_B["default"].weight)
    gate = Effective(site.owner.detach(), site.adapter, transposed=False)
    gate.mask.copy_(torch.rand(gate.mask.shape) < 0.5)
    pull = torch.randn_like(site.owner)
    gate.gated(site.owner.detach()).backward(pull)
    a, b, s = gate.down.weight, gate.up.weight, gate.scale
    torch.testing.assert_close(a.grad, s * b.detach().T @ (pull * gate.mask))
    torch.testing.assert_close(b.grad, s * (pull * gate.mask) @ a.detach().T)
    assert torch.equal(gate.pull, pull)


def test_pruned_first_and_then_recovered_with_adapters():
    from pinscher.prune import prune_once

    model = HEADS["bert"].make()
    prune_once(model, "sparsegpt", 0.5, batches("bert"))
    gone = {site.name: site.owner == 0 for site in find_sites(model)}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS["bert"]))
    pruner = Pruner(wrapped, config("magnitude", sparsity=0.5, regrow=False))
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=1e-2)
    pruner.attach(optimizer)
    for t in range(STEPS):
        step(wrapped, optimizer, batches("bert")[t % 3])
    merged = pruner.finish()
    assert all(torch.equal(site.owner == 0, gone[site.name]) for site in find_sites(merged))


def test_a_teacher_is_the_merged_student():
    model, pruner, optimizer = start()
    data = batches("bert")
    teacher = Teacher(model, kind="classes")
    for t in range(12):
        step(model, optimizer, data[t % 3])
    expected = logits(model, data[0])
    assert teacher.consider(1.0)
    for t in range(3):
        step(model.train(), optimizer, data[t % 3])
    outputs = model(**data[0])
    assert float(teacher.loss(data[0], outputs).detach()) > 0
    torch.testing.assert_close(teacher.snapshot(data[0]).logits, expected)
    assert not torch.equal(logits(model, data[0]), expected)
    pruner.detach()


# ---------------------------------------------------------------- state


@pytest.mark.parametrize("method", ["pins", "magnitude"])
def test_a_resumed_run_is_bit_identical(method, tmp_path):
    data, ends = batches("bert"), []
    for resumed in (False, True):
        model, pruner, optimizer = start(method=method)
        first = 0
        if resumed:
            state = checkpoint.load(tmp_path / "state")
            pruner.load_state_dict(state["pruner"])
            optimizer.load_state_dict(state["optimizer"])
            head = {n: p for n, p in model.named_parameters() if "modules_to_save" in n}
            for name, tensor in state["head"].items():
                head[name].data.copy_(tensor)
            first = 11
        for t in range(first, STEPS):
            step(model, optimizer, data[t % 3])
            if t == 10 and not resumed:
                head = {n: p.detach() for n, p in model.named_parameters() if "modules_to_save" in n}
                checkpoint.save(
                    tmp_path / "state", pruner=pruner.state_dict(), optimizer=optimizer.state_dict(), head=head
                )
        ends.append(pruner.finish().state_dict())
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_a_plain_state_dict_in_mid_run():
    model, pruner, optimizer = start("gpt2-lm")
    data = batches("gpt2-lm")
    for t in range(16):
        step(model, optimizer, data[t % 3])
    plain = HEADS["gpt2-lm"].make()
    plain.load_state_dict(pruner.model_state_dict())
    torch.testing.assert_close(logits(plain, data[0]), logits(model, data[0]), rtol=1e-5, atol=1e-5)
    assert sum(site.zeros() for site in find_sites(plain)) == pruner.total - pruner.kept


def test_a_copy_of_the_model_is_its_own():
    model, _, _ = start()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert logits(model, batches("bert")[0]).any()
    assert not logits(other, batches("bert")[0]).any()


# ---------------------------------------------------------------- PinsTrainer


def trainer_for(folder, **settings) -> PinsTrainer:
    sizes = {"max_steps": 12, "per_device_train_batch_size": 8, "eval_strategy": "steps", "eval_steps": 3}
    return PinsTrainer(
        model=adapted(),
        args=arguments(folder, **(sizes | {"eval_on_start": True} | settings.pop("args", {}))),
        train_dataset=rows("classes"),
        eval_dataset=rows("classes", 8, seed=2),
        data_collator=collate,
        pruning=PruningConfig(sparsity=0.7, interval=2),
        **settings,
    )


@pytest.mark.parametrize("select", ["final", "best"])
def test_the_trainer_ends_with_a_plain_model_and_resumes(select, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4}
    whole = trainer_for(tmp_path / "run", select=select, args=saving)
    whole.train()
    assert type(whole.model).__name__ == "BertForSequenceClassification"
    assert abs(sparsity(whole.model) - 0.7) < 1e-4
    wanted = whole.model.state_dict()
    again = trainer_for(tmp_path / "again", select=select, args=saving)
    again.train(str(tmp_path / "run" / "checkpoint-8"))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.model.state_dict().items())
    whole.save_model(tmp_path / "saved")
    loaded = type(whole.model).from_pretrained(tmp_path / "saved")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())
    # A checkpoint is an ordinary model too, with as many zeros as its step had.
    middle = type(whole.model).from_pretrained(tmp_path / "run" / "checkpoint-8")
    assert 0 < sparsity(middle) <= 0.7001


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_dropout": 0.1}, "Set lora_dropout=0"),
        ({"use_dora": True}, "only plain LoRA"),
        ({"lora_bias": True}, "only plain LoRA"),
    ],
)
def test_adapters_that_cannot_be_merged_under_a_mask_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Pruner(adapted(**settings), config())


@pytest.mark.parametrize("method", ["movement", "pst", "wanda", "sparsegpt", "obert"])
def test_methods_that_change_frozen_weights_are_refused(method):
    with pytest.raises(ValueError, match="cannot be used with adapters"):
        Pruner(adapted(), config(method))


def test_an_optimiser_without_the_adapters_is_refused():
    model = adapted()
    pruner = Pruner(model, config())
    with pytest.raises(ValueError, match="the adapters are not in this optimiser"):
        pruner.attach(torch.optim.SGD(model.base_model.model.classifier.parameters(), lr=0.1))
