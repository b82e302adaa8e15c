"""Replaces methods of torch's classes by functions of this package, which may call the
originals."""

# Annotations of torch's methods are kept, because DistributedDataParallel reads those of its hooks.
import functools
import weakref
from collections.abc import Callable
from typing import Any

_replacements: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def replace_method(of: type, name: str, ours: Callable[..., Any]) -> None:
    """Make calls of a method go to `ours`. A second call for the same method does nothing.

    Args:
        of: the class, whose present and future objects all change.
        name: name of the method.
        ours: function that gets torch's own method, then the object and the arguments of the call.
    """
    if vars(of).get(name) in _replacements:
        return
    native = getattr(of, name)

    @functools.wraps(native)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return ours(native, self, *arguments, **named)

    _replacements.add(call)
    setattr(of, name, call)
