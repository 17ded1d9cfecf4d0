"""Losses whose gradients can be changed each time that a step runs, without another compilation.

Each parameter that a loss gets passes an identity with a derivative of its own, whose backward pass asks the host which
change to make. The host also learns which gradients a step computes: what nothing reads the compiler removes, with the
question.
"""

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_freeze._audit.reactions import CHANGES, changed
from optax_freeze._errors import is_array
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.prefix_tree import is_above
from optax_freeze._spec.sharding import explicit_sharding, with_sharding
from optax_freeze._spec.tree import Part
from optax_freeze._state.state_entries import join

ZERO = CHANGES.index("zero")
_NONE, _ALSO_ZEROS, _SAMPLE = -1, len(CHANGES), 64


@dataclass(eq=False)
class Probe:
    """Losses of parameters, which are known by their numbers, and the changes of their gradients."""

    shapes: Mapping[int, tuple[int, ...]]
    paths: Mapping[int, str]
    masks: Mapping[int, Any]  # where they are frozen: True for everywhere, None for nowhere
    losses: int  # their number
    change: int | None = None  # which change is made, a place in `CHANGES`; None for no change
    chosen: Collection[int] = ()  # whose gradients are changed, at frozen elements; zeros are put in place of all
    zeros: bool = False  # whether elements that are zero are changed, too
    computed: set[int] = field(default_factory=set)  # whose gradients were computed since it was cleared
    called: set[int] = field(default_factory=set)  # the losses that were called
    given: set[int] = field(default_factory=set)  # what a loss was given
    other_shape: set[int] = field(default_factory=set)  # of it what has another shape: which frozen elements?
    other_values: set[int] = field(default_factory=set)  # what is frozen in part, with other values
    differentiated: set[int] = field(default_factory=set)  # with respect to which a loss is differentiated
    nonzero: set[int] = field(default_factory=set)  # of it what has a gradient that is not a symbolic zero,
    not_zero: set[int] = field(default_factory=set)  # and one that is not zero when the step runs, if this is watched
    eager: set[int] = field(default_factory=set)  # whose gradient is computed outside of any jitted function
    twice: set[int] = field(default_factory=set)  # whose gradient is differentiated
    several: set[tuple[str, ...]] = field(default_factory=set)  # subtrees, one of which a loss was given

    def __post_init__(self) -> None:
        self._number_of = {path: i for i, path in self.paths.items()}
        partly = {i: mask for i, mask in self.masks.items() if mask is not True and mask is not None}
        self._samples = {i: _sample(mask, self.shapes[i]) for i, mask in partly.items()}
        self._expected: dict[int, np.ndarray] = {}
        self._below = _subtrees(self.paths.values())

    def begin(self, values: Mapping[int, Any]) -> None:
        """Before a step from these parameters, by number: forgets what was computed."""
        self.computed.clear()
        self._expected = {i: np.asarray(values[i][places]) for i, places in self._samples.items()}

    def loss(self, number: int, fun: Callable[..., Any], at: str | None = None, way: str = "tamper") -> Any:
        """A loss with the same value; ``at`` is the path of the parameters that it gets, if they are a part.

        Another ``way`` is to ``"stop"`` the gradients of parameters that are frozen as a whole, for comparison, or to
        ``"watch"`` which gradients of the others are not zero.
        """

        @functools.wraps(fun)
        def probed(*args: Any, **kwargs: Any) -> Any:
            self.called.add(number)
            given, restore = [], []
            for value in (*args, *kwargs.values()):
                given.append(self._with_identities(value, at, way, restore))
            try:
                return fun(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
            finally:
                for variable, own, value in restore:
                    if _value_of(variable) is value:
                        variable.set_value(own)

        return probed

    def _with_identities(self, argument: Any, at: str | None, way: str, restore: list[Any]) -> Any:
        """An argument of a loss, in which parameters pass an identity; NNX modules are changed in place."""
        walk = _tree.walk(argument)
        found = dict(self._parameters(walk.paths, walk.values, at))
        if not found:
            return argument
        new = {k: self._identity(walk.values[k], i, way) for k, i in found.items()}
        if not any(_is_module(node) for node in jax.tree.leaves(argument, is_leaf=_is_module)):
            return jax.tree.unflatten(walk.treedef, [new.get(k, value) for k, value in enumerate(walk.values)])
        for k, value in new.items():
            variable = walk.variables[k][1]
            restore.append((variable, _value_of(variable), value))
            variable.set_value(value)
        return argument

    def _parameters(
        self, paths: Sequence[str], values: Sequence[Any], at: str | None
    ) -> Iterator[tuple[int, int | tuple[str, ...]]]:
        """The places of parameters in an argument, with their numbers, or the subtrees in which they may be."""
        leaves = {path: k for k, path in enumerate(paths) if _is_inexact(values[k])}
        roots = [""] if leaves else []
        while roots:
            root = roots.pop()
            rel = {_below(path, root): k for path, k in leaves.items() if is_above(root, path)}
            given = {path: values[k] for path, k in rel.items()}
            fits = [b for b in ([at] if at is not None else self._below) if self._fit(given, b, at)]
            if "" in fits and {*given} >= self._below[""]:
                fits = [""]
            if len(fits) == 1:
                [below] = fits
                yield from ((rel[r], self._number_of[join(below, r)]) for r in {*rel} & self._below[below])
            elif fits:
                yield from ((k, tuple(each or "the whole tree" for each in fits)) for k in rel.values())
            elif "" not in rel:
                roots += {join(root, r.partition("/")[0]) for r in rel}

    def _fit(self, given: Mapping[str, Any], below: str, at: str | None) -> bool:
        """Whether a tree has the paths of a subtree of the parameters, more or fewer of them, with their shapes."""
        own = self._below.get(below, set())
        if not (own <= {*given} or {*given} <= own):
            return False
        if "" in given and at is None and "" not in self._below[""]:  # an array alone has no path
            return False
        if not below and own <= {*given} and "" not in own:
            return True
        shapes = {path: self.shapes[self._number_of[join(below, path)]] for path in own & {*given}}
        of_device = not below or at is not None  # one device's slice
        return all(
            isinstance(given[path], Part) or np.shape(given[path]) in (shape, *[shape[1:]] * of_device)
            for path, shape in shapes.items()
        )

    def _identity(self, value: Any, i: int | tuple[str, ...], way: str) -> Any:
        if isinstance(i, tuple):
            return _identity(lambda: self.several.add(i), lambda _, ct: ct)(value) if way == "tamper" else value
        if way == "watch":
            return self._watching(i)(value)
        if isinstance(value, Part):
            return jax.tree.map(lambda array: self._tampering(i, None)(array), value) if way == "tamper" else value
        mask = self._mask_for(i, np.shape(value))
        if way == "tamper":
            self.given.add(i)
            return self._tampering(i, mask)(value)
        return jax.lax.stop_gradient(value) if mask is True else value

    def _mask_for(self, i: int, shape: tuple[int, ...]) -> Any:
        """Where a parameter is frozen, that a loss gets with a shape."""
        mask, own = self.masks[i], self.shapes[i]
        if mask is True or mask is None or shape == own:
            return mask
        if shape == own[1:] and (mask.shape[0] == 1 or (mask == mask[:1]).all()):
            return mask[0]
        self.other_shape.add(i)
        return None

    def _tampering(self, i: int, mask: Any) -> Callable[[Any], Any]:
        """The identity whose gradient is changed if the host says so when the step runs."""

        def asked(*sample: Any) -> np.ndarray:
            self.computed.add(i)
            code = _NONE
            if self.change is not None and i in self.chosen and (mask is not None or self.change == ZERO):
                code = self.change + _ALSO_ZEROS * self.zeros
                given = [self._expected[i].astype(x.dtype).tobytes() == np.asarray(x).tobytes() for x in sample]
                if self.change != ZERO and not all(given):
                    self.other_values.add(i)
                    code = _NONE
            return np.asarray(code, np.int32)

        # Its derivative notes that the gradient is differentiated again, as by a Hessian-vector product.
        @jax.custom_jvp
        def tamper(ct: Any, code: Any) -> Any:
            change = jnp.where(code < 0, code, code % _ALSO_ZEROS)
            new = changed(ct, change)
            where = (code >= 0) & ((ct != 0) | (code >= _ALSO_ZEROS))
            if mask is not True and mask is not None:
                where &= mask | (change == ZERO)
            return jnp.where(where, new, ct)

        @tamper.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            self.twice.add(i)
            ct, code = primals
            factor = jnp.where(code < 0, 1, jnp.where(code == 0, -1, 0))
            return tamper(ct, code), (tangents[0] * factor).astype(ct.dtype)

        def backward(x: Any, ct: Any) -> Any:
            self.nonzero.add(i)
            if not isinstance(ct, Tracer):
                self.eager.add(i)
            sample, struct = self._sampled(i, mask, x), jax.ShapeDtypeStruct((), np.int32)
            code = jax.pure_callback(asked, struct, *sample, vmap_method="sequential")
            return with_sharding(explicit_sharding(ct), tamper, ct, code)

        return _identity(lambda: self.differentiated.add(i), backward)

    def _watching(self, i: int) -> Callable[[Any], Any]:
        """The identity that tells whether its gradient is zero everywhere."""

        def backward(_: Any, ct: Any) -> Any:
            jax.debug.callback(lambda some: self.not_zero.update([i] if some else []), (ct != 0).any())
            return ct

        identity = _identity(lambda: None, backward)
        return lambda value: jax.tree.map(identity, value)

    def _sampled(self, i: int, mask: Any, x: Any) -> list[Any]:
        """Some frozen elements of a parameter of which others train: a loss may get it in another order."""
        if mask is True or mask is None:
            return []
        places = self._samples[i][-x.ndim :]
        x = jax.lax.stop_gradient(x)  # a callback has no derivative
        take = lambda x: x[places]  # noqa: E731
        return [with_sharding(explicit_sharding(x, places[0].shape), take, x)]


def _identity(differentiated: Callable[[], None], backward: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """An identity that tells when it is differentiated, and changes cotangents that are not symbolic zeros."""
    from optax_freeze._jax_internals import SymbolicZero  # loads jax.extend: slow

    @jax.custom_vjp
    def identity(x: Any) -> Any:
        return x

    def forward(x: Any) -> Any:
        if x.perturbed:
            differentiated()
        return x.value, x.value

    changed_or_none = lambda x, ct: (None if isinstance(ct, SymbolicZero) else backward(x, ct),)  # noqa: E731
    identity.defvjp(forward, changed_or_none, symbolic_zeros=True)
    return identity


def _sample(mask: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """The indices of some frozen elements."""
    places = np.argwhere(np.broadcast_to(mask, shape))
    chosen = np.random.default_rng(0).permutation(len(places))[:_SAMPLE]
    return tuple(places[chosen].T)


def _subtrees(paths: Collection[str]) -> dict[str, set[str]]:
    """For the path of each subtree, the paths of its leaves from there."""
    found: dict[str, set[str]] = {"": {*paths}}
    for path in paths:
        names = path.split("/")
        for n in range(1, len(names) + 1):
            found.setdefault("/".join(names[:n]), set()).add("/".join(names[n:]))
    return found


def _below(path: str, root: str) -> str:
    return path[len(root) + 1 :] if root else path


def _is_inexact(value: Any) -> bool:
    return isinstance(value, Part) or (is_array(value) and jnp.issubdtype(value.dtype, jnp.inexact))


def _is_module(node: Any) -> bool:
    return isinstance(node, getattr(sys.modules.get("flax.nnx"), "Module", ()))


def _value_of(variable: Any) -> Any:
    return variable.get_raw_value() if hasattr(variable, "get_raw_value") else variable.raw_value
