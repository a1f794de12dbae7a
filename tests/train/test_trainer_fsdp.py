"""PinsTrainer(fsdp=True) on two gloo ranks: the run of one process with twice the batch, saved and resumed in parts."""

import socket

import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor
from transformers import PrinterCallback, Trainer

import tiny_models
import tiny_sharded as ranks
from pinscher import PinsTrainer, PruningCallback, PruningConfig
from pinscher.train import checkpoint, fsdp, sharded, storage

LIMIT = 300  # seconds; processes that wait for each other would wait for ever
RUNS = {
    "pins": {"options": {"hidden_dropout_prob": 0.1}},  # compared with itself, resumed
    "exact": {},
    "movement": {"method": "movement"},
    "best": {"select": "best"},
    "distilled": {"objective": "knowledge-distillation"},
    "dense": {"method": None},
}
COMPARED = [name for name in RUNS if name != "pins"]


def make_trainer(folder, processes, method="pins", options=None, objective="self-regularization", **more):
    head = tiny_models.HEADS["bert"]
    settings = {
        "per_device_train_batch_size": 4 // processes,
        "gradient_accumulation_steps": 2,
        "max_steps": 8,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
        "save_strategy": "steps",
        "save_steps": 4,
    }
    if processes > 1:
        settings["ddp_backend"] = "gloo"
    trainer = PinsTrainer(
        model=head.make(**(options or {})).double(),
        args=tiny_models.arguments(folder, **settings),
        train_dataset=tiny_models.rows(head.kind),
        eval_dataset=tiny_models.rows(head.kind, 8, seed=2),
        data_collator=tiny_models.collator(head.kind),
        pruning=None if method is None else PruningConfig(method=method, sparsity=0.8, interval=2),
        objective=objective,
        teacher=head.make().double() if objective == "knowledge-distillation" else None,
        fsdp=processes > 1,
        **more,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def prune_by_callback(folder, mesh=None):
    """A stock Trainer with PruningCallback; sharded by whoever made the model."""
    head = tiny_models.HEADS["bert"]
    model = head.make().double()
    if mesh is not None:
        fsdp.shard(model, mesh)
        model._is_distributed_loading_by_transformers = True  # what from_pretrained(distributed_config=…) says
    pruning = PruningCallback(PruningConfig(method="platon", sparsity=0.8, interval=2))
    settings = {"per_device_train_batch_size": 4 if mesh is None else 2, "max_steps": 6, "save_strategy": "no"}
    trainer = Trainer(
        model=model,
        args=tiny_models.arguments(folder, **settings),
        train_dataset=tiny_models.rows(head.kind),
        data_collator=tiny_models.collator(head.kind),
        callbacks=[pruning],
    )
    trainer.train()
    return trainer, pruning


def rank_main(rank, port, folder):
    tiny_models.become_rank(rank, port, LIMIT)
    for name, resume in [*((name, None) for name in RUNS), ("pins", str(folder / "pins" / "checkpoint-4"))]:
        place = folder / (f"{name}-resumed" if resume else name)
        trainer = make_trainer(place, 2, **RUNS[name])
        trainer.train(resume)
        assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
        assert trainer.model_wrapped is trainer.model
        state = {n: sharded.gather(t) for n, t in storage.plain_state(trainer.model).items()}
        if rank == 0:
            checkpoint.save(folder / "ends" / place.name, model=state, changes=trainer.teacher.changes)
        trainer.save_model(str(place))  # beside the checkpoints
    trainer, pruning = prune_by_callback(folder / "callback", fsdp.mesh_over(torch.device("cpu")))
    state = {n: sharded.gather(t) for n, t in storage.plain_state(trainer.model).items()}
    pruning.on_save(trainer.args, trainer.state, trainer.control)
    saved = sharded.load(folder / "callback" / "checkpoint-6" / "pruner", trainer.model)["pruner"]
    if rank == 0:
        checkpoint.save(folder / "ends" / "callback", model=state, t=saved["t"])
    ranks.leave()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ranks.once(tmp_path_factory, "fsdp-trainer", lambda folder: mp.spawn(rank_main, (port, folder), nprocs=2))


@pytest.fixture
def double_losses(monkeypatch):
    """Models and losses that compute in float32 whatever their weights are would differ between batch sizes."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.usefixtures("double_losses")
def test_two_ranks_equal_one_process_with_twice_the_batch(two_ranks, name, tmp_path):
    trainer = make_trainer(tmp_path, 1, **RUNS[name])
    trainer.train()
    found = checkpoint.load(two_ranks / "ends" / name)
    assert found["changes"] == trainer.teacher.changes
    tied = trainer.model.all_tied_weights_keys or {}
    assert found["model"].keys() == {n for n in trainer.model.state_dict() if n not in tied}
    for key, tensor in found["model"].items():
        wanted = trainer.model.state_dict()[key]
        assert torch.equal(tensor == 0, wanted == 0), key
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-9)


@pytest.mark.usefixtures("double_losses")
def test_a_callback_prunes_a_model_that_is_sharded_already(two_ranks, tmp_path):
    trainer, _ = prune_by_callback(tmp_path)
    found = checkpoint.load(two_ranks / "ends" / "callback")
    assert found["t"] == 6
    for key, tensor in found["model"].items():
        wanted = trainer.model.state_dict()[key]
        assert torch.equal(tensor == 0, wanted == 0), key
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-9)


def test_a_resumed_run_is_bit_identical(two_ranks):
    whole, resumed = (checkpoint.load(two_ranks / "ends" / name)["model"] for name in ("pins", "pins-resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("name", RUNS)
def test_the_saved_model_is_an_ordinary_one(two_ranks, name):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(two_ranks / name)
    found = checkpoint.load(two_ranks / "ends" / name)["model"]
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, found[key])
    assert type(model).__name__ == "BertForSequenceClassification"


def test_a_checkpoint_has_a_file_for_each_process_and_no_pickle(two_ranks):
    names = sorted(path.name for path in (two_ranks / "pins" / "checkpoint-4").iterdir())
    parts = [name for name in names if name.endswith(".safetensors")]
    assert len(parts) == 2
    assert sorted(set(names) - set(parts)) == ["checksums.json", "sharded.json", "trainer_state.json"]
