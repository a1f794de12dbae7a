"""transformers' reader of the small file; imported when transformers is, never before (registration.py).

`from_pretrained` finds quant_method "pinscher" in config.json, makes this quantizer, and hands every stored
`weight` to its one operation. Files are checked before any weight is touched. A few threads decode matrices ahead of
use, at most one each. The resulting model is dense and ordinary.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, _IdentityOp, dot_natural_key
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from pinscher.errors import InputError
from pinscher.models import folders
from pinscher.models.sizes import resize_
from pinscher.store import payload, registration
from pinscher.store.checks import check_version
from pinscher.store.file import VERSION, Stored, is_packed
from pinscher.store.fitting import fit
from pinscher.store.streams import DamagedError

METHOD = "pinscher"


@register_quantization_config(METHOD)
class PinscherConfig(QuantizationConfigMixin):
    """The settings of the small file in config.json."""

    def __init__(self, version: int = VERSION, **settings: Any) -> None:
        self.quant_method: Any = METHOD
        self.version = version
        self.settings = {key: value for key, value in settings.items() if key not in ("quant_method", "dequantize")}
        self.dequantize = True  # the loaded model has plain weights

    def to_dict(self) -> dict[str, Any]:
        """For config.json."""
        return {"quant_method": METHOD, "version": self.version, **self.settings}


@register_quantizer(METHOD)
class PinscherQuantizer(HfQuantizer):
    """Unpacks stored matrices as they are loaded."""

    serialized_names = {"weight": ["weight"]}  # noqa: RUF012  (the base class's attribute)

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.ahead: Ahead | None = None
        self.folder: Path | None = None
        self.homes: dict[str, str] = {}  # the stored name of each parameter
        self.failure: Exception | None = None  # transformers replaces the text of any error of an operation

    def validate_environment(self, *_: Any, **__: Any) -> None:
        if not self.pre_quantized:
            raise InputError("the model is not stored in pinscher's format: pinscher.save_pretrained stores it so.")

    def update_attn_implementation(self, config: Any) -> Any:
        """The first call with the config, and the last before a model of the size that it claims is built."""
        folder = Path(str(getattr(config, "name_or_path", None) or "?"))
        if folder.is_dir():  # set by an Auto class; other classes set it later
            folders.check(folder)
        else:
            folders.check_layers(config.to_dict())
        return config

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        files = [Path(path) for path in kwargs["checkpoint_files"] or ()]
        home = Path(getattr(model, "name_or_path", None) or "?")
        check_version({"version": getattr(self.quantization_config, "version", None)}, home / folders.CONFIG)
        inside = not home.is_dir() or all(path.parent.resolve().is_relative_to(home.resolve()) for path in files)
        if not files or len({path.parent for path in files}) > 1 or not inside:
            raise DamagedError(f"{home}: the index of the model names files outside its folder, or none")
        if (sizes := getattr(self.quantization_config, "settings", {}).get("shrunk")) is not None:
            resize_(model, sizes)
        stored = Stored(files)
        try:
            self.homes = fit(model, stored)
        except BaseException:
            stored.close()
            raise
        self.ahead, self.folder = Ahead(stored), files[0].parent

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": Unpack}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.ahead is not None:
            self.ahead.close()
        self.ahead = None
        if self.failure is not None:
            raise self.failure
        # The unpacked model is saved unchanged: there is no conversion to revert.
        model._weight_conversions = [c for c in model._weight_conversions if not _unpacks(c)] or None
        if self.folder is not None:
            for tell in registration.WHEN_LOADED:
                tell(model, self.folder)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def _unpacks(conversion: Any) -> bool:
    return any(isinstance(operation, Unpack) for operation in getattr(conversion, "operations", ()))


class Unpack(ConversionOps):
    """Unpacks a stored tensor into its parameter."""

    def __init__(self, hf_quantizer: PinscherQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, _: Any) -> Unpack:
        return self  # transformers copies the operation for every parameter

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        key = kwargs["full_layer_name"]
        wanted = kwargs["model"].get_parameter_or_buffer(key)
        return {name: self._ready(value, key, wanted) for name, value in input_dict.items()}

    def _ready(self, value: Any, key: str, wanted: Tensor) -> Tensor:
        stored: Tensor = value[0] if isinstance(value, list) else value
        weight = self._unpacked(stored, key, wanted) if is_packed(stored) else stored
        return weight.to(device=stored.device, dtype=wanted.dtype if weight.is_floating_point() else None)

    def _unpacked(self, stored: Tensor, key: str, wanted: Tensor) -> Tensor:
        quantizer = self.hf_quantizer
        assert quantizer.ahead is not None
        if quantizer.failure is None:
            try:
                with quantizer.ahead.stored.naming(quantizer.homes[key]):
                    return quantizer.ahead.take(stored.cpu())
            except Exception as error:  # raised when transformers is done: until then it would replace the message
                quantizer.failure = error
        return torch.zeros((), dtype=wanted.dtype).expand(wanted.shape)  # takes no memory, and is never used

    @property
    def reverse_op(self) -> ConversionOps:
        return _IdentityOp()


class Ahead:
    """Decodes the next matrices while the current one is copied.

    The order is that of transformers; a matrix is identified by its header, whose checksum is that of its content.
    """

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        names = sorted(stored.names(), key=dot_natural_key)
        self.waiting = deque(name for name in names if is_packed(stored.raw(name)))
        self.threads = max(1, min(8, os.cpu_count() or 1))
        self.pool = payload.workers(self.threads)
        self.running: dict[bytes, Future[Tensor]] = {}

    def take(self, packed: Tensor) -> Tensor:
        self._fill()
        future = self.running.pop(_key(packed), None)
        weight = payload.unpack(packed) if future is None else future.result()
        self._fill()
        return weight

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.threads:
            packed = self.stored.raw(self.waiting.popleft())
            self.running.setdefault(_key(packed), self.pool.submit(payload.unpack, packed))

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.stored.close()


def _key(packed: Tensor) -> bytes:
    return bytes(packed[: payload.HEADER.size].numpy())
