"""Run folders for the tests of the report: real runs of tiny models, and folders written by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

import tiny_tasks
from tiny_command import SHORT, outcome


def real_runs(root: Path) -> list[Path]:
    """Two finished runs on the same data: pins with its dense twin and its small file, and magnitude."""
    tiny_tasks.write_files("sst2", root / "data")
    tiny_tasks.tiny_model("sst2", root / "model")
    words = ["prune", "--model", root / "model", "--task", "sst2", "--data", root / "data", *SHORT]
    steps = ["--learning-rate", "5e-3", "--interval", "1"]
    assert outcome([*words, *steps, "--output", root / "pins", "--baseline"])[0] == 0
    assert outcome([*words, *steps, "--output", root / "magnitude", "--method", "magnitude", "--no-export"])[0] == 0
    return [root / "pins", root / "magnitude"]


def written(
    folder: Path,
    weights: dict[str, Any] | None = None,
    log: list[dict[str, Any]] | None = None,
    result: dict[str, Any] | None = None,
    transposed: bool = False,
    **settings: Any,
) -> Path:
    """A run folder with these matrices, [outputs, inputs], as blocks 0, 1, … of one kind each."""
    folder.mkdir(parents=True)
    sites, stored = [], {}
    for place, (name, weight) in enumerate((weights or {}).items()):
        tensor = torch.as_tensor(weight, dtype=torch.float32)
        stored[f"net.layer.{place}.{name}.weight"] = (tensor.T if transposed else tensor).contiguous()
        where = {"tensor": f"net.layer.{place}.{name}.weight", "block": f"net.layer.{place}", "kind": name}
        sites.append(where | {"outputs": len(tensor), "inputs": tensor.shape[1], "transposed": transposed})
    run = {"model": "a-model", "task": "sst2", "method": "pins", "sparsity": 0.5, "objective": "empirical-risk"}
    text = yaml.safe_dump({"run": run | settings, "versions": {"pinscher": "0"}, "sites": sites}, allow_unicode=True)
    (folder / "config.yaml").write_text(text)
    if stored:
        (folder / "model").mkdir()
        save_file(stored, folder / "model" / "model.safetensors")
    if log is not None:
        (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    if result is not None:
        (folder / "result.json").write_text(json.dumps({"status": "finished", "main": "accuracy", "steps": 1} | result))
    return folder


def data_of(text: str) -> dict:
    """What a page's script reads."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
