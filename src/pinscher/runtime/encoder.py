"""A BERT-family model whose layers run in native code: the same class, the same call, the same outputs.

Tokens that the attention mask hides are not computed; their hidden states come out as zeros. A row's first token is
computed even if it is hidden, since poolers and heads read it: it attends to the others, none to it. Where only that
one is read, as by a classifier, most of the last layer is not computed either.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from pinscher.errors import InputError
from pinscher.models import surgery
from pinscher.models.families import FAMILIES, Family, check_padding, type_of
from pinscher.runtime import guards, packing
from pinscher.runtime.core import Core, Norms, build

REFUSED = ("encoder_hidden_states", "encoder_attention_mask", "past_key_values", "output_attentions")
# The base model whose caller reads first tokens only. A context variable, since the caller is transformers' own code:
# not all of its classifiers pass further arguments on to the base model (MPNet's does not), and an attribute would be
# seen by calls from other threads.
ONLY_FIRST: ContextVar[Any] = ContextVar("only_first", default=None)


class Layers(guards.Unpicklable, nn.Module):
    """Stands where the embeddings and layers were."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.core = core

    @property
    def packed(self) -> list[list[Any]]:
        """Each layer's matrices."""
        return self.core.packed

    @property
    def threads(self) -> int:
        return self.core.threads

    @threads.setter
    def threads(self, count: int) -> None:
        self.core.threads = count

    def extra_repr(self) -> str:
        matrices = [matrix for layer in self.packed for matrix in layer]
        zeros = 1 - sum(m.nonzeros for m in matrices) / max(1, sum(m.rows * m.columns for m in matrices))
        kinds = [matrix.kind for matrix in matrices]
        listed = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        return f"{self.core.count} layers of width {self.core.width}, {zeros:.1%} zeros; matrices: {listed}"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        hidden: Tensor | None,
        indices: list[Any],
        shape: tuple[int, int],
        mask: Tensor | None,
        every: bool,
        first: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """The last hidden state, [*shape, width], and every layer's if asked for.

        Args:
            hidden: [*shape, width], or None: then indices are used.
            indices: one for each table of embeddings, each an array of that shape.
            shape: rows and tokens.
            mask: of that shape, or None.
            every: whether all layers' outputs are wanted.
            first: whether each row's first token will do; then the last hidden state is [rows, 1, width], unless it
                has to be computed whole for another reason.
        """
        rows = packing.visible(None if mask is None else mask.numpy(), shape)
        given = None if hidden is None else hidden.detach().float().numpy()
        last, states = self.core.run(given, indices, rows, every, first)
        if len(last) == shape[0] and len(last) != rows.tokens:
            return torch.from_numpy(last).view(shape[0], 1, -1), None
        placed = torch.from_numpy(rows.placed(last))
        return placed, None if states is None else tuple(torch.from_numpy(rows.placed(state)) for state in states)

    def __copy__(self) -> Layers:
        return self

    def __deepcopy__(self, _: Any) -> Layers:
        return self  # weights in the kernels' layout are never changed: copies may share them


class FastEncoder(guards.Unpicklable):
    """Mixed into a copy of a base model (BertModel, …), whose pooler stays torch's; sparse.py sets its attributes."""

    takes: tuple[str, ...]  # the arguments of the model's own forward, in their order
    needs_whole: bool  # whether distances between tokens count: a mask may then have no holes
    longest: int  # tokens in a row
    result_class: type

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *given: Any, **named: Any) -> Any:
        """As the model's own; see transformers."""
        guards.refuse_tracing()
        return self._run(**dict(zip(self.takes, given, strict=False)), **named)

    def _run(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        me: Any = self
        asked = {"output_attentions": me.config.output_attentions} | others
        if refused := [name for name in REFUSED if asked.get(name) not in (None, False)]:
            raise InputError(f"the sparse runtime has no {refused[0]}: call the model it was made from.")
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give either input_ids or inputs_embeds.")
        attention_mask = guards.as_mask(attention_mask)
        guards.check_tensors(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
        )
        guards.check_numbers(me.dtype, inputs_embeds=inputs_embeds)
        every = me.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        as_dict = me.config.return_dict if return_dict is None else return_dict
        shape = _shape(input_ids, inputs_embeds, me.longest, me.get_submodule(_family(me).embeddings[0]).embedding_dim)
        mask = _checked(attention_mask, shape, whole=me.needs_whole)
        guards.check_indices(shape, input_ids=input_ids, token_type_ids=token_type_ids, position_ids=position_ids)
        tables = _tables(me)
        guards.check_range("position_ids", position_ids, tables["position_ids"])
        with torch.no_grad():
            with guards.naming_what_is_out_of_range(tables, input_ids=input_ids, token_type_ids=token_type_ids):
                hidden, indices = None, []
                if input_ids is not None and position_ids is None:
                    types = None if token_type_ids is None else token_type_ids.numpy()
                    indices = me.fast_layers.core.indices(input_ids.numpy(), types)
                else:
                    hidden = embedded(me, input_ids, token_type_ids, position_ids, inputs_embeds)
                first = ONLY_FIRST.get() is me
                last, states = me.fast_layers(hidden, indices, shape, mask, bool(every), first)
            last = last.to(me.dtype)
            fields = {"last_hidden_state": last}
            if (pooler := getattr(me, "pooler", None)) is not None:
                fields["pooler_output"] = pooler(last)
            if states is not None:
                fields["hidden_states"] = tuple(state.to(me.dtype) for state in states)
            found = me.result_class(**fields)
        return found if as_dict else found.to_tuple()


def is_classifier(model: Any) -> bool:
    """Whether a model is one of transformers' own that classify or rate whole sequences."""
    kind = type(model)
    return kind.__module__.startswith("transformers.models.") and kind.__name__.endswith("ForSequenceClassification")


def reads_first_only(model: Any) -> bool:
    """Whether nobody sees more of a classifier's last hidden state than the first token of each row.

    That is so while what takes the first token, pooler or head, is transformers' own, and nobody looks on.
    """
    base, pooling = model.base_model, _family(model).pooling
    watched = [base]
    if pooling in ("pooler", "head"):
        watched.append(base.pooler if pooling == "pooler" else model.classifier)
    if pooling == "last" or any(type(part).__module__ != type(model).__module__ for part in watched[1:]):
        return False
    hooks = [part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in watched]
    return not any(hooks) and not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks


@functools.cache
def asks_for_first(kind: type) -> type:
    """The same class of classifiers, whose base model is told when first tokens will do."""

    @functools.wraps(kind.forward)  # type: ignore[attr-defined]
    def forward(self: Any, *given: Any, **named: Any) -> Any:
        guards.refuse_tracing()
        before = ONLY_FIRST.set(self.base_model if reads_first_only(self) else None)
        try:
            return kind.forward(self, *given, **named)  # type: ignore[attr-defined]
        finally:
            ONLY_FIRST.reset(before)

    return surgery.subclass(kind, guards.Unpicklable, forward=forward)


def embedded(
    base: Any, ids: Tensor | None, types: Tensor | None, positions: Tensor | None, given: Tensor | None
) -> Tensor:
    """What torch makes of tokens before the first layer."""
    inputs = {"input_ids": ids, "position_ids": positions, "inputs_embeds": given}
    family = _family(base)
    if family.has_token_types:
        inputs["token_type_ids"] = types
    hidden: Tensor = _embeddings(base)(**inputs)
    return base.get_submodule(family.projection)(hidden) if _is_projected(base) else hidden


def _shape(ids: Tensor | None, given: Tensor | None, longest: int, width: int) -> tuple[int, int]:
    some, dimensions = (ids, 2) if ids is not None else (given, 3)
    assert some is not None
    if some.dim() != dimensions or (ids is not None and ids.is_floating_point()):
        raise InputError(f"inputs of {some.dim()} dimensions and type {some.dtype} are not what the model takes.")
    if given is not None and given.shape[2] != width:
        raise InputError(f"inputs_embeds of {given.shape[2]} features are not what the model takes: give {width}.")
    if some.shape[1] == 0:
        raise InputError("the rows have no tokens: give each at least one.")
    if some.shape[1] > longest:
        raise InputError(f"{some.shape[1]} tokens in a row: the model takes {longest}.")
    return some.shape[0], some.shape[1]


def _checked(mask: Tensor | None, shape: tuple[int, int], whole: bool) -> Tensor | None:
    if mask is None:
        return None
    if mask.shape != shape:
        raise InputError(
            f"attention_mask has shape {list(mask.shape)}; the sparse runtime takes one number for each token, "
            f"{list(shape)}."
        )
    if whole and bool((mask.bool().int().diff(dim=1, prepend=torch.zeros(len(mask), 1)) > 0).sum(1).gt(1).any()):
        raise InputError(
            "this model knows how far tokens are apart: the mask may hide the ends of a row, not its inside."
        )
    return mask


def native_layers(base: Any, family: Family, packed: list[list[Any]], threads: int) -> Core:
    """The native parts of a base model; `packed` holds each layer's matrices in the order of `family.products`."""
    parameters = dict(base.named_parameters())

    def get(name: str) -> Any:
        found = parameters.get(name)
        return None if found is None else found.detach().float().contiguous().numpy()

    check_padding(base.config, f"the config of {type(base).__name__}")
    first = base.get_submodule(family.layers)[0] if packed else None
    own = base.get_submodule(family.embeddings_norm).eps
    of_layers = own if first is None else first.get_submodule(family.attention_norm).eps
    return build(base.config, family, packed, get, Norms(of_layers, own), threads)


def _family(model: Any) -> Family:
    return FAMILIES[type_of(model.config)]


def _embeddings(base: Any) -> Any:
    """The module that holds the tables of embeddings."""
    return base.get_submodule(_family(base).embeddings[0].rpartition(".")[0])


def _tables(base: Any) -> dict[str, Any]:
    """The tables of embeddings by the inputs that are looked up in them."""
    found = [base.get_submodule(name) for name in _family(base).embeddings]
    return dict(zip(("input_ids", "position_ids", "token_type_ids"), found, strict=False))


def _is_projected(base: Any) -> bool:
    projection = _family(base).projection
    return bool(projection) and hasattr(base, projection)
