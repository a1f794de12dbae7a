"""A drop-in for a pruned model that skips the zeros.

BERT-family models run whole layers in native code (encoder.py). Of any other model, the matrices of its blocks become
SparseLinear modules, and everything else, caches and `generate()` included, stays as it is.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pinscher import native
from pinscher.errors import InputError
from pinscher.models import surgery
from pinscher.models.blocks import outputs_first
from pinscher.models.families import Family, max_positions, native_family
from pinscher.models.sizes import has_all_heads
from pinscher.registry import unknown
from pinscher.runtime import choice, guards, kernels
from pinscher.runtime.encoder import FastEncoder, Layers, asks_for_first, is_classifier, native_layers
from pinscher.runtime.heads import use_heads_
from pinscher.runtime.kernels import Weights
from pinscher.store.saving import matrices

Source = Callable[[str], Weights]  # the matrix of a module, by the module's name
# What decoders call their inputs.
MASKS = ("attention_mask", "decoder_attention_mask")
TOKENS = ("input_ids", "decoder_input_ids")
EMBEDDED = ("inputs_embeds", "decoder_inputs_embeds")


class SparseLinear(guards.Unpicklable, nn.Module):
    """y = W x + b for any tensor whose last dimension is x, without the zeros of W."""

    def __init__(self, matrix: Any, bias: Tensor | None, threads: int) -> None:
        super().__init__()
        self.matrix, self.threads = matrix, threads
        self.in_features, self.out_features = matrix.columns, matrix.rows
        self.bias = None if bias is None else bias.detach().float()
        # Some models look at the type or shape of a weight before they multiply; there is nothing in this one.
        self.weight = torch.empty(matrix.rows, matrix.columns, device="meta", dtype=torch.float32)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        guards.refuse_tracing()
        guards.check_tensors(features=x)
        if x.shape[-1] != self.in_features:
            raise InputError(f"{x.shape[-1]} features were given, the matrix takes {self.in_features}.")
        flat = x.detach().float().reshape(-1, self.in_features).contiguous().numpy()
        add = None if self.bias is None else self.bias.float().numpy()
        out = torch.from_numpy(kernels.multiply(self.matrix, flat, add, self.threads))
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def __copy__(self) -> SparseLinear:
        return self

    def __deepcopy__(self, _: Any) -> SparseLinear:
        return self

    def extra_repr(self) -> str:
        zeros = 1 - self.matrix.nonzeros / max(1, self.matrix.rows * self.matrix.columns)
        return f"{self.in_features} → {self.out_features}, {self.matrix.kind}, {zeros:.1%} zeros"


def accelerate(model: Any, *, mode: str = "auto", threads: int | None = None) -> Any:
    """A copy of a transformers model that runs fast; the arguments are those of `pinscher.accelerate`.

    Raises:
        InputError: for an unknown mode, or a model without matrices in blocks.
    """
    if mode not in choice.MODES:
        raise InputError(unknown("mode", mode, choice.MODES) + ".")
    if not isinstance(model, nn.Module):
        raise InputError(f"{type(model).__name__} is no model: load one with transformers, or see pinscher.load.")
    if any(isinstance(module, SparseLinear | Layers) for module in model.modules()):
        raise InputError("the model is accelerated already: use it as it is, or accelerate the one it was made from.")
    count = kernels.threads_of(threads)
    names = [matrix.path for matrix in matrices(model).values() if matrix.role == "matrix"]
    if not names:
        raise InputError("the model has no matrices in blocks: there is nothing to make fast.")
    if native.core() is None:
        return _twin(model)
    if not choice.gains((weights_of(model, name) for name in names), choice.bits_for(model, mode), mode):
        warnings.warn("no matrix of the model has enough zeros to gain: it stays in PyTorch, as it is.", stacklevel=2)
        return _twin(model)
    made = assemble(_twin(model), lambda name: weights_of(model, name), mode, count)
    _part_from_native_(model)
    return made


def _twin(model: Any) -> Any:
    """A copy for inference that shares the memory of the weights; what is done to it is not done to the model."""
    shared: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    shared |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, shared).eval()


def weights_of(model: Any, name: str) -> Weights:
    """The matrix of a module, outputs first."""
    return Weights(dense=outputs_first(model.get_submodule(name)).float().contiguous().numpy())


def assemble(model: Any, source: Source, mode: str, threads: int) -> Any:
    """Puts native parts into a model that is ours to change; `source` gives the matrices."""
    family = native_family(model) if has_all_heads(model) else None
    source = _fitting(model, source)
    model.eval()
    model.requires_grad_(False)
    if family is not None:
        _use_layers_(model, family, source, mode, threads)
    else:
        _use_linears_(model, source, mode, threads)
    for part in (model, model.base_model):
        for refuse, names in REFUSED.items():
            for name in names:
                setattr(part, name, refuse)
    _part_from_native_(model)
    return model


def _part_from_native_(model: Any) -> None:
    """Gives each parameter a storage of its own on the same memory, which is not freed with it.

    `share_memory` moves a storage and frees its old memory under all that read it, as native layers do.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.dtype == torch.float32:
            parameter.data = torch.from_numpy(parameter.detach().numpy())


def _fitting(model: Any, source: Source) -> Source:
    """The same matrices; one that does not fit into the model is refused when it is read, not when it is used."""
    known = [m for m in matrices(model).values() if m.role == "matrix"]
    shapes = {matrix.path: outputs_first(matrix.module).shape for matrix in known}

    def fitting(name: str) -> Weights:
        found = source(name)
        if found.shape != shapes[name]:
            own = name.rpartition(".")[2]  # whoever reads it says the whole name
            raise InputError(f"{own}.weight has the shape {list(found.shape)}, the model needs {list(shapes[name])}.")
        return found

    return fitting


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise InputError("an accelerated model cannot be saved: save the one it was made from (pinscher.save_pretrained).")


def _refuse_to_tell(*_: Any, **__: Any) -> None:
    raise InputError(
        "an accelerated model has no state_dict, and cannot be traced or exported (take the model it was made from)."
    )


def _refuse_to_change(*_: Any, **__: Any) -> None:
    raise InputError("an accelerated model cannot be changed: change the one it was made from, and accelerate it anew.")


# Methods of a model that would save or change what is left in torch of an accelerated one, as if that were all.
REFUSED = {
    _refuse_to_save: ("save_pretrained", "push_to_hub"),
    _refuse_to_tell: ("state_dict",),
    _refuse_to_change: ("load_state_dict", "set_input_embeddings", "resize_token_embeddings"),
}


def _use_layers_(model: Any, family: Family, source: Source, mode: str, threads: int) -> None:
    import transformers.modeling_outputs as outputs

    base = model.base_model
    if is_classifier(model):
        surgery.become_(model, asks_for_first(type(model)))  # type: ignore[arg-type]
    prefix = next(name for name, module in model.named_modules() if module is base)
    stem = ".".join(part for part in (prefix, family.layers) if part)
    layers = [
        [_lazily(source, [f"{stem}.{number}.{name}" for name in names]) for names in family.products]
        for number in range(len(base.get_submodule(family.layers)))
    ]
    core = choice.chosen_layers(base.config, layers, mode, lambda packed: native_layers(base, family, packed, threads))
    base.fast_layers = Layers(core)
    use_heads_(model, family, threads)
    delattr(base, family.layers.partition(".")[0])
    base.takes = tuple(inspect.signature(type(base).forward).parameters)[1:]
    base.needs_whole = bool(family.relative_bias)
    base.longest = max_positions(base.config)
    base.result_class = getattr(outputs, family.result)
    surgery.become_(base, surgery.subclass(type(base), FastEncoder))


def _correct_linears_(model: Any, linears: list[Any], weights: list[choice.Lazy]) -> None:
    """The same for a model whose matrices are SparseLinear modules: the whole of it is run."""
    sample = torch.from_numpy(choice.sample(model.base_model.config.get_text_config()))
    inputs = {"input_ids": sample}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = sample

    def hidden(mixed: list[Any]) -> Any:
        for linear, matrix in zip(linears, mixed, strict=True):
            linear.matrix = matrix
        with torch.no_grad():
            return model.base_model(**inputs)[0].float().numpy()

    packed = [linear.matrix for linear in linears]
    choice.correct_(packed, weights, hidden)
    for linear, matrix in zip(linears, packed, strict=True):
        linear.matrix = matrix


def _reads_tokens(model: Any) -> bool:
    """Whether a sample for a model can be made here."""
    takes = inspect.signature(model.base_model.forward).parameters
    return "input_ids" in takes and hasattr(model.config.get_text_config(), "vocab_size")


def _lazily(source: Source, names: list[str]) -> tuple[str, choice.Lazy]:
    """Matrices with the same inputs as one, read when it is asked for; and what to call it."""
    return " + ".join(names), lambda: kernels.stacked([source(name) for name in names])


def _use_linears_(model: Any, source: Source, mode: str, threads: int) -> None:
    if mode in choice.GUARDED and not _reads_tokens(model):
        mode = "fp32"  # what int8 would cost cannot be seen
    bits = choice.bits_for(model, mode)
    names = [m.path for m in matrices(model).values() if m.role == "matrix"]
    some = [_lazily(source, [name]) for name in names]
    linears = []
    for name, (title, weights) in zip(names, some, strict=True):
        matrix = choice.packed_as(title, weights, bits)
        parent, _, child = name.rpartition(".")
        linears.append(SparseLinear(matrix, model.get_submodule(name).bias, threads))
        setattr(model.get_submodule(parent), child, linears[-1])
    if mode in choice.GUARDED:
        _correct_linears_(model, linears, [weights for _, weights in some])
    taken = tuple(inspect.signature(model.forward).parameters)
    model.register_forward_pre_hook(functools.partial(_checked, taken), with_kwargs=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _checked(
    names: tuple[str, ...], model: Any, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs as a model takes them, checked as encoders do. `names` are those of the model's own forward.

    Embeddings come before the first of our modules, and make something of tensors without numbers.
    """
    guards.refuse_tracing()
    given = tuple(_ready(*pair) for pair in zip(names, given, strict=False)) + given[len(names) :]
    named = {name: _ready(name, value) for name, value in named.items()}
    told = dict(zip(names, given, strict=False)) | named
    rows = {name: told.get(name) for name in (*TOKENS, *EMBEDDED)}
    guards.check_tensors(**{name: value for name, value in told.items() if isinstance(value, Tensor)} | rows)
    guards.check_not_empty(**rows)
    for name in TOKENS:
        if (ids := told.get(name)) is not None:
            guards.check_tokens(**{name: ids})
            guards.check_range(name, ids, _table(model))
    for name in EMBEDDED:
        guards.check_numbers(model.dtype, **{name: told.get(name)})
    return given, named


def _table(model: Any) -> Any:
    """The embeddings of a model's tokens, if transformers knows where they are."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # a family of its own
        return None


def _ready(name: str, value: Any) -> Any:
    """A mask as a tensor; `generate` also makes several at once, by the kind of layer."""
    return guards.as_mask(value) if name in MASKS and not isinstance(value, Mapping) else value
