"""The definition of a matrix of a block, shared by pruning, storing, running and inspecting.

No architecture is named here: blocks are the members of a `ModuleList` (or of a `Sequential` of one class). What lies
outside (embeddings, pooler, head) has another role. Inside a block every `nn.Linear`, every GPT-2 `Conv1D` (stored
transposed) and the projections of `nn.MultiheadAttention` are matrices; norms, biases and embeddings are not. A weight
shared by several modules is one matrix; if one of them is an embedding, it is no matrix of a block. Adapters are
transparent: the matrix below counts, the adapter's own factors do not. Names are those of the plain model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from pinscher.models.names import Place, clean_name, is_of_adapter

ROLES = ("embedding", "matrix", "head")  # a shared weight has the first of these that any of its uses has


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix of a model, where one module uses it."""

    path: str  # of its module, as `named_modules` has it
    module: nn.Module
    parameter: str  # its name in that module
    role: str  # "matrix" (of a block), "embedding", or "head" (any other linear layer)
    place: Place

    @property
    def transposed(self) -> bool:
        """Whether it is stored [inputs, outputs]."""
        return self.place.transposed

    @property
    def name(self) -> str:
        """The module's clean name, followed by the parameter's own name unless that is "weight"."""
        return self.place.name + _suffix(self.parameter)

    @property
    def owner(self) -> Tensor:
        return owner_of(self.module, self.parameter)


# ------------------------------------------------------------ modules


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's Conv1D, recognised without importing transformers: a matrix stored [in, out] with `nf` outputs."""
    kinds = type(module).__mro__  # gates and FSDP2 make subclasses
    return any(kind.__name__ == "Conv1D" for kind in kinds) and hasattr(module, "nf")


def is_matrix(module: nn.Module) -> bool:
    """Whether a module is of a kind that has matrices."""
    return bool(_parameters(module))


def is_adapted(module: nn.Module) -> bool:
    """A peft layer that adds a low-rank adapter to the matrix inside it, recognised without importing peft."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def owner_of(module: nn.Module, parameter: str) -> Tensor:
    """The parameter that an optimiser updates, below any gate."""
    if parametrize.is_parametrized(module, parameter):
        owner = module.parametrizations[parameter].original  # type: ignore[union-attr, index]
    else:
        owner = getattr(module, parameter)
    assert isinstance(owner, Tensor)
    return owner


def outputs_first(module: Any) -> Tensor:
    """A module's weight as [outputs, inputs], without autograd; writing to it changes the module."""
    weight: Tensor = module.weight.detach()
    return weight.T if is_conv1d(module) else weight


def _parameters(module: nn.Module) -> list[str]:
    """The names of the matrices that a module of a known kind owns."""
    if isinstance(module, nn.MultiheadAttention):
        names = ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"]
        return [n for n in names if getattr(module, n, None) is not None]
    return ["weight"] if isinstance(module, nn.Linear) or is_conv1d(module) else []


# ------------------------------------------------------------ models


def uses(model: nn.Module) -> list[Matrix]:
    """Every use of a matrix in a model, embeddings included, in the order of its modules; a shared weight each time."""
    blocks = list(_blocks(model))
    found = []
    for path, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding)
        if is_of_adapter(path) and not is_embedding:
            continue
        name = clean_name(path)
        block = next((b for b in blocks if name.startswith(b + ".")), "")
        kind = name[len(block) + 1 :] if block else name
        role = "embedding" if is_embedding else "matrix" if block else "head"
        for parameter in ["weight"] if is_embedding else _parameters(module):
            place = Place(name, parameter, block, kind + _suffix(parameter), is_conv1d(module))
            found.append(Matrix(path, module, parameter, role, place))
    return found


def untied(some: Iterable[Matrix]) -> list[list[Matrix]]:
    """The uses of each weight together, in the order of the first; among them embeddings come first, heads last."""
    groups: dict[int, list[Matrix]] = {}
    for use in some:
        groups.setdefault(id(use.owner), []).append(use)
    return [sorted(group, key=lambda use: ROLES.index(use.role)) for group in groups.values()]


def matrices(model: nn.Module) -> list[Matrix]:
    """The matrices of a model, each once: an embedding if it is one anywhere, else of a block if it is there."""
    return [group[0] for group in untied(uses(model))]


def block_matrices(model: nn.Module) -> list[Matrix]:
    """The matrices of a model's blocks, each once."""
    return [matrix for matrix in matrices(model) if matrix.role == "matrix"]


def _suffix(parameter: str) -> str:
    return "" if parameter == "weight" else f".{parameter}"


def _blocks(model: nn.Module) -> Iterator[str]:
    """The clean paths of the transformer blocks: the members of the outermost lists of composite modules."""
    inside: list[str] = []
    for name, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential) or any(name.startswith(p) for p in inside):
            continue
        single = {n for n, m in container.named_children() if _parameters(m) or is_adapted(m)}
        composite = {n: m for n, m in container.named_children() if n not in single and _has_matrices(m)}
        if isinstance(container, nn.Sequential) and (len(composite) < 2 or len({*map(type, composite.values())}) > 1):
            continue
        if composite:
            inside.append(name + "." if name else "")
            yield from (clean_name(f"{name}.{child}") for child in composite)


def _has_matrices(model: nn.Module) -> bool:
    return any(_parameters(module) for name, module in model.named_modules() if not is_of_adapter(name))
