"""Patterns are called by their names only where they hold; others' masks are read as they compute; sums are right."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import prune as torch_prune

import pinscher
import tiny_tasks
from pinscher import inspecting
from pinscher.errors import InputError
from pinscher.prune.sites import find_sites
from pinscher.report import inspect as looking
from pinscher.report import masks, patterns, places, sources
from pinscher.store import payload
from pinscher.train import data, models, sensitivity
from pinscher.train.config import RunConfig
from pinscher.train.evaluation import answer
from pinscher.train.plan import task_of
from tiny_command import finished_run, outcome
from tiny_models import HEADS

# ---------------------------------------------------------------- patterns


def n_of_m(kept: int, size: int, rows: int = 64, columns: int = 128, seed: int = 0) -> np.ndarray:
    """Exactly `kept` of each `size` neighbours in a row."""
    order = np.random.default_rng(seed).random((rows, columns // size, size)).argsort(-1)
    return (order < kept).reshape(rows, columns)


def tiles(height: int, width: int, density: float = 0.3, rows: int = 128, columns: int = 256) -> np.ndarray:
    alive = np.random.default_rng(1).random((rows // height, columns // width)) < density
    return np.kron(alive, np.ones((height, width))).astype(bool)


@pytest.mark.parametrize("seed", range(3))
def test_heads_that_were_kept_are_no_n_of_m(seed):
    """As in masks of real runs: one head nearly whole, the others nearly empty, and hardly a group with so many."""
    chance = np.full((12, 1, 384), 0.01)  # by head, and column
    chance[:, :, :96] = 0.15
    chance[3] = 0.55
    chance[3, :, :96] = 0.8
    mask = (np.random.default_rng(seed).random((12, 32, 384)) < chance).reshape(384, 384)
    assert patterns.find(mask).name == "unstructured"


@pytest.mark.parametrize(("kept", "size"), [(1, 2), (1, 4), (2, 4), (3, 4), (2, 8), (4, 8), (8, 16), (16, 32)])
def test_n_of_m_is_called_so_along_inputs_and_along_outputs(kept, size):
    mask = n_of_m(kept, size, rows=128, columns=256)
    assert patterns.find(mask).name == f"{kept}:{size}"
    assert patterns.find(mask.T).name == f"{kept}:{size} along outputs"
    group = mask[5].reshape(-1, size)[3]
    group[:] = True  # one group too many
    assert patterns.find(mask).name != f"{kept}:{size}"


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (2, 2), (8, 1), (16, 16), (1, 32), (32, 32)])
def test_blocks_are_called_by_their_largest_shape(shape):
    mask = tiles(*shape)
    assert patterns.find(mask).name == f"blocks {shape[0]}x{shape[1]}"
    mask[17, 33] ^= True  # one weight alone breaks it
    assert patterns.find(mask).name == "unstructured"


def test_rows_columns_and_heads():
    mask = np.ones((64, 96), bool)
    assert patterns.find(mask).name == "dense"
    assert patterns.find(~mask) == patterns.Pattern("empty", "empty", 64, 96)
    mask[[3, 9, 60]] = False
    assert patterns.find(mask, head=16) == patterns.Pattern("rows", "rows-columns", 3, 0)
    assert patterns.find(mask.T).name == "columns"
    mask[:, 7] = False
    assert patterns.find(mask).name == "rows and columns"
    heads = np.ones((64, 96), bool)
    heads[16:48] = False
    assert patterns.find(heads, head=16) == patterns.Pattern("heads", "heads", 32, 0, 2)
    assert patterns.find(heads.T, head=16, head_axis=1) == patterns.Pattern("heads", "heads", 0, 32, 2)
    assert patterns.find(heads).name == "rows"  # nobody said that there are heads
    heads[0] = False  # and a row of another head
    assert patterns.find(heads, head=16).name == "rows"


def test_what_is_left_of_a_pattern_keeps_its_name_and_its_dead_rows():
    mask = n_of_m(2, 4)
    mask[10:20] = False
    assert patterns.find(mask) == patterns.Pattern("2:4", "n:m", 10, 0)
    loose = np.random.default_rng(0).random((64, 128)) < 0.5
    loose[:, :4] = False
    assert patterns.find(loose) == patterns.Pattern("unstructured", "unstructured", 0, 4)


def test_a_tiny_matrix_proves_nothing():
    assert patterns.find(np.array([[1, 0, 0, 1], [0, 1, 1, 0]], bool)).name == "unstructured"  # 2:4, as it happens
    assert patterns.find(np.array([[1, 1], [0, 0]], bool)).name == "unstructured"


@settings(max_examples=150, deadline=None)
@given(
    rows=st.sampled_from([32, 96, 128, 384]),
    columns=st.sampled_from([32, 128, 384, 512]),
    sparsity=st.floats(0.01, 0.999),
    uneven=st.floats(0, 3),
    seed=st.integers(0, 10**9),
)
def test_random_zeros_are_never_called_a_pattern(rows, columns, sparsity, uneven, seed):
    random = np.random.default_rng(seed)
    chance = (1 - sparsity) * np.exp(uneven * random.normal(size=(rows, 1)))  # rows differ in pruned models
    found = patterns.find(random.random((rows, columns)) < chance)
    assert found.family in ("unstructured", "dense", "empty")


# ---------------------------------------------------------------- ranks, sizes, sums


def checkpoint(tensors, **config):
    return sources.Checkpoint("it", tensors, config, None)


def look(tensors, **settings):
    config = settings.pop("config", {})
    return looking.inspect(checkpoint(tensors, **config), places.guessed(tensors), payload.sizes, **settings)


def test_ranks_are_numpys_and_sizes_are_those_of_real_files():
    torch.manual_seed(0)
    thin = torch.randn(48, 5) @ torch.randn(5, 32)
    sparse = torch.randn(48, 32) * (torch.rand(48, 32) < 0.2)
    sparse[:7] = 0
    found = look({"layers.0.a.weight": thin, "layers.0.b.weight": sparse, "layers.1.a.weight": torch.zeros(8, 16)})
    for matrix, weight in zip(found.matrices, (thin, sparse, torch.zeros(8, 16)), strict=True):
        assert matrix.rank == np.linalg.matrix_rank(weight.numpy())
        assert matrix.zeros == int((weight == 0).sum())
        for codec, size in matrix.sizes.items():
            assert size == len(payload.pack(weight, "int8", codecs=(codec,)))
    assert [m.rank for m in found.matrices] == [5, 32, 0]
    words = " ".join(looking.said(found))
    assert "layers.0.a (rank 5)" in words
    assert "1 is empty: only the bias is left of layers.1.a" in words


def test_sums_over_kinds_and_layers():
    torch.manual_seed(0)
    tensors = {f"h.{i}.{kind}.weight": torch.randn(16, 8) for i in range(3) for kind in ("up", "down")}
    tensors["h.1.up.weight"][:4] = 0
    found = look(tensors)
    kinds, layers = found.totals(lambda m: m.kind), found.totals(lambda m: m.layer)
    assert (kinds["up"]["zeros"], kinds["down"]["zeros"]) == (32, 0)
    assert [layer["weights"] for layer in layers.values()] == [256] * 3
    assert (layers["1"]["dead_rows"], layers["1"]["sparsity"]) == (4, 32 / 256)
    for sums in (kinds, layers):
        for codec in ("csr", "delta", "bitmask", "entropy"):
            assert sum(s["sizes"][codec] for s in sums.values()) == sum(m.sizes[codec] for m in found.matrices)


def test_numbers_that_are_not_finite_are_told_and_the_rest_is_shown():
    found = look({"h.0.up.weight": torch.full((8, 8), torch.nan), "h.1.up.weight": torch.randn(8, 8)})
    assert [m.rank for m in found.matrices] == [None, 8]
    assert "1 of them hold NaN or infinity, first h.0.up" in " ".join(looking.said(found))


def test_without_a_model_matrices_are_recognised_by_name_and_shape():
    shapes = {
        "model.embed_tokens.weight": (64, 16),
        "blocks.0.attn.c_attn.weight": (16, 48),
        "blocks.0.ln_1.weight": (16,),
        "blocks.0.rel.relative_attention_bias.weight": (32, 4),
        "blocks.0.mlp.up.weight": (32, 16),
        "pooler.dense.weight": (16, 16),
        "lm_head.weight": (64, 16),
    }
    found = places.guessed({name: torch.randn(shape) for name, shape in shapes.items()})
    assert [(p.block, p.kind, p.transposed) for p, _ in found] == [
        ("blocks.0", "attn.c_attn", True),
        ("blocks.0", "mlp.up", False),
    ]
    flat = places.guessed({"first.weight": torch.randn(16, 16), "words.weight": torch.randn(1000, 16)})
    assert [place.name for place, _ in flat] == ["first"]


@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2", "llama-lm", "t5"])
def test_matrices_of_known_models_are_their_sites(name, tmp_path):
    model = HEADS[name].make()
    for number, site in enumerate(find_sites(model)):
        with torch.no_grad():
            site.weight[: 3 + number] = 0
    model.save_pretrained(tmp_path)
    found = inspecting.look(str(tmp_path), rank=False)
    assert [(m.name, m.zeros) for m in found.matrices] == [(s.name, s.zeros()) for s in find_sites(model)]
    assert found.notes == []
    for matrix, site in zip(found.matrices, find_sites(model), strict=True):
        assert matrix.shape == (tuple(site.shape)[::-1] if site.transposed else tuple(site.shape))


def test_dead_heads_are_seen_in_a_real_model(tmp_path):
    model = HEADS["bert"].make(hidden_size=64, num_attention_heads=4)
    attention = model.bert.encoder.layer[0].attention
    with torch.no_grad():
        for matrix in (attention.self.query, attention.self.key, attention.self.value):
            matrix.weight[16:32] = 0
        attention.output.dense.weight[:, 16:32] = 0
    model.save_pretrained(tmp_path)
    found = inspecting.look(str(tmp_path), layers=r"layer\.0\.attention")
    assert [(m.pattern.name, m.pattern.dead_heads) for m in found.matrices] == [("heads", 1)] * 4


# ---------------------------------------------------------------- as others write it


@pytest.fixture
def bert():
    """A pruned model, and how many zeros each of its matrices has."""
    model = HEADS["bert"].make()
    torch.manual_seed(3)
    zeros = {}
    for site in find_sites(model):
        with torch.no_grad():
            site.effective.mul_(torch.rand(site.shape) < 0.4)
        zeros[site.name] = site.zeros()
    return model, zeros


def zeros_of(place, **settings):
    found = inspecting.look(str(place), settings.pop("rule", None), rank=False)
    return {m.name: m.zeros for m in found.matrices}, found


def test_platon_state_dicts_with_prefixes(bert, tmp_path):
    model, zeros = bert
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state": wrapped, "epoch": 3, "config": {"lr": 1e-5}}, tmp_path / "model_2.pt")
    bare, found = zeros_of(tmp_path / "model_2.pt")
    assert bare == zeros
    assert "no config.json" in found.notes[0]
    model.config.save_pretrained(tmp_path)  # with it the model is known
    known, found = zeros_of(tmp_path / "model_2.pt")
    assert (known, found.notes) == (zeros, [])
    inner = {name.removeprefix("bert."): value for name, value in model.state_dict().items()}
    torch.save(inner, tmp_path / "model_2.pt")
    known, found = zeros_of(tmp_path)
    assert {f"bert.{name}": count for name, count in known.items()} == zeros
    assert found.notes == []


def test_an_old_torch_file_that_is_no_zip(bert, tmp_path):
    model, zeros = bert
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    model.config.save_pretrained(tmp_path)
    assert zeros_of(tmp_path)[0] == zeros


def test_sparseml_folders_and_shards(bert, tmp_path):
    model, zeros = bert
    model.config.save_pretrained(tmp_path / "ml")
    torch.save(model.state_dict(), tmp_path / "ml" / "pytorch_model.bin")
    torch.save({"args": 1}, tmp_path / "ml" / "training_args.bin")
    (tmp_path / "ml" / "recipe.yaml").write_text("pruning_modifiers:\n  - !GMPruningModifier\n    params: __ALL__\n")
    seen, found = zeros_of(tmp_path / "ml")
    assert seen == zeros
    assert "SparseML" in found.notes[0]
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert zeros_of(tmp_path / "shards")[0] == zeros
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(InputError, match="the model is not complete"):
        zeros_of(tmp_path / "shards")


def test_torch_prune_keeps_masks_beside_the_weights(tmp_path):
    model = HEADS["bert"].make()
    linears = [module for module in model.bert.encoder.modules() if isinstance(module, nn.Linear)]
    for module in linears:
        torch_prune.l1_unstructured(module, "weight", amount=0.25)
    expected = [int((module.weight == 0).sum()) for module in linears]
    torch.save(model.state_dict(), tmp_path / "pruned.pt")
    seen, found = zeros_of(tmp_path / "pruned.pt")
    assert list(seen.values()) == expected == [module.weight.numel() // 4 for module in linears]
    assert "torch.nn.utils.prune" in found.notes[0]


def test_matrices_stay_in_order_where_only_some_have_masks():
    first, last = torch.eye(2), torch.ones(2, 2)
    tensors = {"0.weight_orig": last, "0.weight_mask": first, "1.weight": last, "2.weight_orig": last}
    done = masks.applied(tensors | {"2.weight_mask": last})
    assert list(done.tensors) == ["0.weight", "1.weight", "2.weight"]
    assert torch.equal(done.tensors["0.weight"], first)


def scored(tmp_path, shape=lambda rows, columns: (rows, columns), key="mask_scores", method=None):
    """A model with scores for each of its matrices, saved as movement pruning saves it."""
    model = HEADS["bert"].make()
    torch.manual_seed(1)
    state = dict(model.state_dict())
    sites = find_sites(model)
    scores = {site.name: torch.randn(shape(*site.shape)) for site in sites}
    state |= {f"{name}.{key}": value for name, value in scores.items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    told = model.config.to_dict() | {
        "model_type": "masked_bert",
        "architectures": ["MaskedBertModel"],
    }
    (tmp_path / "config.json").write_text(json.dumps(told | ({"pruning_method": method} if method else {})))
    return sites, scores


def test_movement_scores_prune_as_they_were_trained(tmp_path):
    sites, scores = scored(tmp_path, method="topK")
    seen, found = zeros_of(tmp_path, rule=masks.Rule(threshold=0.15))
    assert seen == {site.name: site.numel - int(0.15 * site.numel) for site in sites}
    assert "pruned by topK, threshold 0.15" in " ".join(found.notes)
    seen, _ = zeros_of(tmp_path, rule=masks.Rule("sigmoied_threshold", 0.6))
    assert seen == {name: int((torch.sigmoid(s) <= 0.6).sum()) for name, s in scores.items()}
    seen, _ = zeros_of(tmp_path, rule=masks.Rule("threshold", -0.5))
    assert seen == {name: int((s <= -0.5).sum()) for name, s in scores.items()}
    seen, _ = zeros_of(tmp_path, rule=masks.Rule("l0"))
    assert seen == {name: int((1.2 * torch.sigmoid(s) <= 0.1).sum()) for name, s in scores.items()}
    seen, _ = zeros_of(tmp_path, rule=masks.Rule("threshold", 99.0))  # half a percent stays, as in the original
    assert seen == {site.name: site.numel - int(0.005 * site.numel) - 1 for site in sites}
    seen, _ = zeros_of(tmp_path, rule=masks.Rule("magnitude", 0.5))
    assert seen == {site.name: site.numel - site.numel // 2 for site in sites}
    with pytest.raises(InputError, match="--mask-threshold"):
        zeros_of(tmp_path)


def test_nn_pruning_scores_of_blocks_and_of_rows(tmp_path):
    key = "mask_module.context_modules.0.mask_scores"
    _, scores = scored(tmp_path, lambda rows, columns: (rows // 4, columns // 4), key)
    args = {"dense_pruning_method": "sigmoied_threshold", "attention_pruning_method": "sigmoied_threshold"}
    (tmp_path / "sparse_args.json").write_text(json.dumps(args | {"final_threshold": 0.5}))
    seen, _ = zeros_of(tmp_path)
    assert seen == {name: 16 * int((s <= 0).sum()) for name, s in scores.items()}
    sites, scores = scored(tmp_path, lambda rows, columns: (rows,), key)
    seen, found = zeros_of(tmp_path)
    assert seen == {site.name: int((scores[site.name] <= 0).sum()) * site.shape[1] for site in sites}
    assert {m.pattern.name for m in found.matrices} == {"rows"}
    (tmp_path / "sparse_args.json").write_text(json.dumps(args | {"dense_pruning_method": "topK"}))
    with pytest.raises(InputError, match="mixes mask methods"):
        zeros_of(tmp_path)
    (tmp_path / "sparse_args.json").unlink()
    with pytest.raises(InputError, match="--mask-method"):
        zeros_of(tmp_path)
    _, _ = scored(tmp_path, lambda rows, columns: (rows, columns - 1), key)
    with pytest.raises(InputError, match="do not fit their weight"):
        zeros_of(tmp_path, rule=masks.Rule("threshold", 0.0))


def test_our_small_file(bert, tmp_path):
    model, zeros = bert
    pinscher.save_pretrained(model, tmp_path / "small", values="fp32")
    assert zeros_of(tmp_path / "small")[0] == zeros
    assert zeros_of(tmp_path / "small" / "model.safetensors")[0] == zeros


def test_a_model_that_transformers_does_not_know(tmp_path):
    torch.manual_seed(0)
    tensors = {f"stack.{i}.mix.weight": torch.randn(16, 16) for i in range(2)} | {"embed.weight": torch.randn(99, 16)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "novel", "architectures": ["NovelModel"]}))
    seen, found = zeros_of(tmp_path)
    assert list(seen) == ["stack.0.mix", "stack.1.mix"]
    assert found.notes[0].startswith("transformers knows no model NovelModel: ")


# ---------------------------------------------------------------- the command


def test_the_command_prints_sums_and_writes_json(bert, tmp_path, capsys):
    model, zeros = bert
    model.save_pretrained(tmp_path / "model")
    code, out, _ = outcome(["inspect", tmp_path / "model", "--json", tmp_path / "said.json"], capsys)
    assert code == 0
    written = json.loads((tmp_path / "said.json").read_text())
    assert {m["name"]: m["zeros"] for m in written["matrices"]} == zeros
    assert written["whole"]["zeros"] == sum(zeros.values())
    assert written["layers"].keys() == {"0", "1"}
    for name in (*written["kinds"], *written["words"]):
        assert name in out
    assert "\x1b" not in out  # plain, where no terminal is
    stored = load_file(tmp_path / "model" / "model.safetensors")
    first = stored["bert.encoder.layer.0.attention.self.query.weight"]
    assert written["matrices"][0]["sizes"]["entropy"] == len(payload.pack(first, "int8", codecs=("entropy",)))
    code, out, _ = outcome(["inspect", tmp_path / "model", "--layers", r"layer\.1\..*query", "--no-rank"], capsys)
    assert code == 0
    assert "attention.self.query" in out
    assert "attention.self.key" not in out


class Evil:
    def __reduce__(self):
        return (print, ("this must never be printed",))


def test_mistakes_are_one_line_and_code_2(tmp_path, capsys):
    torch.save({"weight": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "broken.safetensors").write_bytes(b"not at all")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    torch.save([1, 2], tmp_path / "list.pt")
    save_file({"a": torch.ones(3)}, tmp_path / "vector.safetensors")
    save_file({"h.0.up.weight": torch.ones(8, 8)}, tmp_path / "fine.safetensors")
    for words, expected in {
        ("evil.pt",): "holds more than tensors",
        ("broken.safetensors",): "cannot read",
        ("empty",): "holds no model",
        ("notes.txt",): "is no checkpoint",
        ("list.pt",): "holds no state dict",
        ("vector.safetensors",): "has no matrix to look at",
        ("nothing.bin",): "there is no file",
        ("fine.safetensors", "--layers", "("): "not a regular expression",
        ("fine.safetensors", "--layers", "down"): "has no matrix that --layers 'down' names",
        ("fine.safetensors", "--task", "sst2"): "--task goes with --sensitivity",
        ("fine.safetensors", "--rows", "9"): "--rows goes with --sensitivity",
        ("fine.safetensors", "--levels", "0.5"): "--levels goes with --sensitivity",
        ("fine.safetensors", "--mask-method", "guess"): "unknown mask method 'guess'",
        ("fine.safetensors", "--sensitivity", "--levels", "much"): "--levels takes numbers",
        ("fine.safetensors", "--sensitivity", "--task", "sst2"): "is a file",
    }.items():
        code, out, err = outcome(["inspect", tmp_path / words[0], *words[1:]], capsys)
        assert code == 2, words
        assert expected in err
        assert err.startswith("error: ")
        assert len(err.strip().splitlines()) == 1
        assert "never be printed" not in out + err


# ---------------------------------------------------------------- sensitivity


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("run"))


def test_sensitivity_is_what_pruning_by_hand_gives(run, capsys):
    """Independent of the code under test: topk instead of the threshold, a fresh model for every trial."""
    code, out, _ = outcome(["inspect", run, "--sensitivity", "--levels", "0.9,0.97", "--json", run / "s.json"], capsys)
    assert code == 0
    found = json.loads((run / "s.json").read_text())["sensitivity"]
    config = RunConfig.from_dict(RunConfig.settings_of(run / "config.yaml"))
    task = task_of(config)
    rows = data.load(task, data.Source(config.data), seed=config.seed).validation
    tokenizer = models.load_tokenizer(str(run / "model"))

    def score(chosen, level):
        labels = tuple(models.load_config(str(run / "model")).id2label[i] for i in range(2))
        model = models.load_model(str(run / "model"), task, labels, tokenizer)
        picked = [site.effective for site in find_sites(model) if chosen(site)]
        if picked:
            flat = torch.cat([weight.detach().reshape(-1) for weight in picked]).abs()
            cut = flat.topk(int((1 - level) * len(flat) + 0.5)).values[-1]
            with torch.no_grad():
                for weight in picked:
                    weight[weight.abs() < cut] = 0
        return task.scores(answer(model, task, tokenizer, rows, labels), rows)[task.main]

    whole = score(lambda _: False, 0)
    assert (found["score"], found["rows"], found["measure"]) == (whole, len(rows), "accuracy")
    assert len(found["losses"]) == 2 + 6
    for one in found["losses"]:
        attribute = "block" if one["group"] == "layer" else "kind"
        for level, lost in one["lost"].items():
            by_hand = whole - score(lambda site, a=attribute, u=one["unit"]: getattr(site, a) == u, float(level))
            assert lost == pytest.approx(by_hand)
    worst = [one["lost"]["0.97"] for one in found["losses"]]
    assert worst == sorted(worst, reverse=True)
    assert "when one layer or kind alone" in out


def test_what_was_pruned_for_a_trial_is_put_back(run):
    model = models.transformers.AutoModelForSequenceClassification.from_pretrained(run / "model")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sites = find_sites(model)
    with sensitivity.pruned(sites, 0.95):
        zeros = sum(site.zeros() for site in sites)
        assert zeros == sum(site.numel for site in sites) - int(0.05 * sum(site.numel for site in sites) + 0.5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_text_is_judged_by_its_loss(tmp_path):
    files = tiny_tasks.write_files("e2e", tmp_path / "data")
    tiny_tasks.tiny_model("e2e", tmp_path / "model")
    settings = {"task": "e2e", "data": str(files.folder)}
    found = sensitivity.measure(str(tmp_path / "model"), settings, [0.5], rows=3)
    assert (found.measure, found.rows) == ("loss", 3)
    assert found.score > 0
    assert len(found.losses) == 2 + 4


def test_a_model_without_a_head_has_nothing_to_lose(run, tmp_path, capsys):
    words = ["--sensitivity", "--data", run.parent / "data"]
    for place, more, expected in (
        (run.parent / "model", ["--task", "sst2"], "has no head for a task"),
        (run.parent / "model", [], "--sensitivity needs the task"),
        (run, ["--levels", "1.5"], "--levels must lie between 0 and 1, not 1.5"),
        (run, ["--rows", "0"], "--rows must be at least 1, not 0"),
    ):
        code, _, err = outcome(["inspect", place, *words, *more], capsys)
        assert code == 2
        assert expected in err
