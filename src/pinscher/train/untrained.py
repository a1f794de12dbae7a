"""Pruning without training (`--max-steps 0`), as SparseGPT and Wanda are used on language models."""

from __future__ import annotations

from typing import Any

from pinscher.errors import InputError
from pinscher.prune import CRITERIA, prune_once
from pinscher.train.batches import calibration_batches
from pinscher.train.plan import Plan, evaluating_device


def prune(plan: Plan, model: Any) -> None:
    """Prunes a model without training it, with training rows as calibration data; a dense run leaves it unchanged."""
    device = evaluating_device()
    model.to(device)
    if plan.pruning is None:
        return
    config, pruning = plan.config, plan.pruning
    criterion = CRITERIA[config.method](**config.option)
    number = criterion.calibration_rows(config.batch_size)
    collate = plan.task.collator(plan.tokenizer)
    try:
        prune_once(
            model,
            config.method,
            config.sparsity,
            calibration_batches(plan.train, collate, number, config.batch_size, config.seed, device),
            pattern=pruning.pattern,
            scope=pruning.scope,
            target_modules=pruning.target_modules,
            exclude_modules=pruning.exclude_modules,
            **config.option,
        )
    except ValueError as error:
        raise InputError(str(error)) from None
