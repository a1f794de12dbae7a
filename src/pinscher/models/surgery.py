"""The only place that gives a module another class.

Sometimes a live module must behave differently and keep its identity: `isinstance`, its name and place in the model,
its parameters, hooks and `state_dict`, and the references that others hold. A wrapper would be another object of
another class, under another name. An attribute `forward` would form a reference cycle with its module, which only the
garbage collector frees, and users and libraries set that attribute themselves. So the module becomes an instance of a
subclass with its parent's name, as in torch's parametrizations and FSDP2.

Its users: runtime/sparse.py mixes native layers into a copy of an encoder, and lets a copy of a classifier tell its
encoder that only first tokens are read; prune/snapshot.py expands a packed matrix while a teacher reads it, and then
restores the class; train/tasks/embeddings.py lets a base model give embeddings; integrations/sentence_transformers.py
makes a model that its library loaded the fast one, in place.

Two other devices change the behaviour of foreign code; each is beside the only code that it serves. The context
variable ONLY_FIRST (runtime/encoder.py) tells a base model what its caller reads: it belongs to one call, not to a
module, so no other class could carry it. The import hook (store/registration.py) registers the small file when
transformers is imported: it must be in place after `import pinscher`, before there is any module, and needs no torch.
"""

from __future__ import annotations

from typing import Any

_MADE: dict[tuple[Any, ...], type] = {}


def subclass(kind: type, /, *mixins: type, **members: Any) -> type:
    """A subclass that goes by the name of its parent, the same one every time.

    Args:
        kind: the parent.
        mixins: classes whose methods come before the parent's.
        members: attributes of the subclass, such as a property or a method.
    """
    key = (kind, mixins, tuple(members.items()))
    if key not in _MADE:
        told = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        _MADE[key] = type(kind.__name__, (*mixins, kind), told | members)
    return _MADE[key]


def become_(module: Any, kind: type) -> None:
    """Makes a module an instance of a subclass of its class, or takes it back to its class."""
    assert issubclass(kind, type(module)) or issubclass(type(module), kind)
    module.__class__ = kind
