"""Any checkpoint is scored, on the rows and with the labels that it should be."""

import json
import shutil
from pathlib import Path

import torch

from tiny_command import SHORT, complaint


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
    assert "--rows must" in complaint(command("eval", "./theirs", *sst2[2:], "--rows", "0"))
    assert "--max-length 2 leaves no room" in complaint(command("eval", "./theirs", *sst2[2:], "--max-length", "2"))
    assert command("eval", "./theirs", *sst2[2:], "--max-length", "3", "--output", "short")[0] == 0
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
