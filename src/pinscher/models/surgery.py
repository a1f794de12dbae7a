"""Gives a module another class, in the one place that does so.

A live module sometimes has to behave otherwise and still be what it was: `isinstance`, its name and place in the model,
its parameters, hooks and `state_dict`, and whoever holds a reference to it. A wrapper around it would be another object
of another class, under another name; an attribute `forward` of its own would hold a reference to its module, so that
neither is freed until the garbage collector comes by, and users and libraries set that attribute themselves. So the
module becomes an instance of a subclass that goes by its parent's name. torch's parametrizations and FSDP2 do the same.

Its users: runtime/sparse.py mixes native layers into a copy of an encoder, and lets a copy of a classifier tell its
encoder that first tokens will do; prune/snapshot.py lets a matrix be expanded while a teacher reads it, and takes the
class back.

Two other devices change what code of others does, and each stands beside the only code that it serves. The context
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
