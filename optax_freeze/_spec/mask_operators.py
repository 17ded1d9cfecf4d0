"""The operators ``|`` and ``&`` of element masks, which are errors that say what to write instead."""

from typing import Any, TypeGuard

from optax_freeze._errors import described, type_error


class MaskOperators:
    """Element masks do not combine by themselves: which elements they freeze depends on the shape of a leaf."""

    def __or__(self, other: Any) -> Any:
        raise _no_operator(self, other, "|")

    def __and__(self, other: Any) -> Any:
        raise _no_operator(self, other, "&")

    __ror__, __rand__ = __or__, __and__


def _no_operator(a: Any, b: Any, symbol: str) -> TypeError:
    what, expected = f"an element mask has no {symbol}", "selectors: fz.rules says for which leaves a mask is"
    is_selector = isinstance(b, str) or hasattr(b, "select")
    if is_selector or (_is_static(a) and _is_static(b) and a.axis == b.axis):
        fix = f" {symbol} ".join(repr(each) if each is b and is_selector else _for_leaves(each) for each in (a, b))
    else:
        fix = as_arrays(a, b, symbol, "leaf.shape")
    return type_error(what, at=symbol, got=f"{a!r} and {described(b)}", expected=expected, fix=fix)


def _for_leaves(mask: Any) -> str:
    return f"fz.rules({{pattern: {mask!r}}})"


def as_arrays(a: Any, b: Any, symbol: str, shape: Any) -> str:
    """What to write for two masks of one leaf that do not combine."""
    code = [_as_array(name, mask, shape) for name, mask in (("a", a), ("b", b)) if _is_static(mask)]
    if len(code) < 2 or len(repr(a) + repr(b)) > 200:
        return f"combine the masks as arrays: one fz.elements(a {symbol} b)"
    return f"combine them as arrays: {'; '.join(code)}; fz.elements(a {symbol} b)"


def _as_array(name: str, mask: Any, shape: Any) -> str:
    index: Any = list(mask.index) if isinstance(mask.index, tuple) else mask.index
    if isinstance(index, slice):
        index = ":".join("" if bound is None else str(bound) for bound in (index.start, index.stop, index.step))
    before, after = (":, " * mask.axis, "") if mask.axis >= 0 else ("..., ", ", :" * (-mask.axis - 1))
    made = "np.ones" if mask.inverted else "np.zeros"
    return f"{name} = {made}({shape}, bool); {name}[{before}{index}{after}] = {not mask.inverted}"


def _is_static(mask: Any) -> TypeGuard[Any]:
    """Whether a mask is of static rows, the only one with an index."""
    return isinstance(mask, MaskOperators) and hasattr(mask, "index")
