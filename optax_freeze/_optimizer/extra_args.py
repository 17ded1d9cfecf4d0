"""The extra arguments of an update: trees like the gradients, and functions that Optax calls with the parameters."""

from collections.abc import Callable
from typing import Any

OF_PARAMS = ("value_fn", "obj_fn", "grad_fn")
"""The names of these functions."""


def mapped(
    extra_args: dict[str, Any], tree: Callable[[Any], Any], function: Callable[[Any], Any] = lambda fn: fn
) -> dict[str, Any]:
    """The arguments with ``tree`` of each, and of what ``grad_fn`` returns, and ``function`` of each function."""
    found = {name: x if name in OF_PARAMS else tree(x) for name, x in extra_args.items()}
    found |= {name: function(fn) for name, fn in found.items() if name in OF_PARAMS and callable(fn)}
    if callable(grad_fn := found.get("grad_fn")):
        found["grad_fn"] = lambda *args, **kwargs: tree(grad_fn(*args, **kwargs))
    return found
