"""Computes everything that depends only on frozen parameters and a batch once, instead of in every epoch.

The transfer-learning guides of Keras and Flax split the model by hand to store the features of a frozen encoder. Here
the loss stays as it is: it is traced, and its program is divided.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
from jax.sharding import NamedSharding

from optax_freeze._errors import described, is_array, value_error, whole_number
from optax_freeze._gradient.restrict import refuse_no_function
from optax_freeze._precompute.cut_explanation import CutExplanation, Feature
from optax_freeze._precompute.inputs import Arguments
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.layout import fitting
from optax_freeze._spec.memory import on_device
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.selection import FROZEN, RowIndex, Selection
from optax_freeze._spec.tree import HOLE, Leaf, Part, PyTree

if TYPE_CHECKING:
    from optax_freeze._precompute.divide import Division


@jax.tree_util.register_pytree_node_class
class Features(tuple[Any, ...]):
    """Stores the features of a batch: a tuple of arrays, and a pytree that keeps its type under ``jax.tree.map``.

    Its static part identifies the program that computed the features and holds the shapes of the parameters. So frozen
    leaves that only this program reads may be missing later.

    Attributes:
      arrays: the arrays in the tuple.
      cut: a digest of the program; static.
      leaves: the path and shape of each parameter (a ``jax.ShapeDtypeStruct``, or None for an object); static.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> loss = lambda params, x: jnp.sum(jnp.tanh(x @ params["encoder"]) @ params["head"])
      >>> params = {"encoder": jnp.ones((4, 8)), "head": jnp.ones((8, 1))}
      >>> features = fz.precompute(loss, "encoder").before(params, jnp.ones((2, 4)))
      >>> [array.shape for array in features]
      [(2, 8)]
    """

    cut: str
    leaves: tuple[tuple[str, Any], ...]

    def __new__(cls, arrays: Iterable[Any], cut: str, leaves: Sequence[tuple[str, Any]]) -> Self:
        self = super().__new__(cls, arrays)
        self.cut, self.leaves = cut, tuple(leaves)
        return self

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return tuple(self), (self.cut, self.leaves)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Iterable[Any]) -> "Features":
        return cls(arrays, *static)

    def __reduce__(self) -> Any:
        return Features, (tuple(self), self.cut, self.leaves)

    def __repr__(self) -> str:
        return f"Features({tuple.__repr__(self)})"


class Precomputed:
    """A function divided into ``before``, which is computed once for each batch, and ``after``, the rest.

    Returned by :func:`optax_freeze.precompute`.

    Attributes:
      fun: the function.
      frozen: the spec of its frozen parameters.
      recurring: the arguments that recur.
      example_axis: the axis of the examples in the recurring arguments, or None.
      after: ``after(params, features, *args, **kwargs)`` computes the result of the function from the features. Frozen
        leaves that only ``before`` reads may be holes, and arguments that only ``before`` reads may be shapes
        (``jax.ShapeDtypeStruct``).

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> def loss(params, batch):
      ...   return jnp.mean((jnp.tanh(batch @ params["encoder"]) @ params["head"] - 1) ** 2)
      >>> params = {"encoder": jnp.ones((4, 8)), "head": jnp.ones((8, 1))}
      >>> once, batch = fz.precompute(loss, "encoder"), jnp.ones((2, 4))
      >>> features = jax.jit(once.before)(params, batch)
      >>> needed = once.needed(params, batch)
      >>> needed["encoder"]
      MaskedNode()
      >>> value, grads = fz.value_and_grad(once.after, "encoder")(needed, features, batch)
      >>> bool(jnp.allclose(value, loss(params, batch)))
      True
    """

    after: Callable[..., Any]

    def __init__(self, fun: Callable[..., Any], frozen: Spec, recurring: Any, example_axis: int | None) -> None:
        self.fun, self.frozen, self.recurring, self.example_axis = fun, frozen, recurring, example_axis
        self.arguments = Arguments(fun, recurring)
        self.after = _After(self)

    def __repr__(self) -> str:
        name = getattr(self.fun, "__qualname__", type(self.fun).__name__)
        return f"fz.precompute({name}, {described(self.frozen)})"

    def before(self, params: PyTree, /, *args: Any, **kwargs: Any) -> Features:
        """Computes the features of a batch: the values that are stored and reused. Call it inside ``jax.jit``.

        Args:
          params: the full parameters.
          *args: the other arguments of the function.
          **kwargs: its keyword arguments.

        Returns:
          The features: a tuple of arrays. With ``example_axis``, the examples are along the first axis of each array.

        Raises:
          ValueError: if the spec does not fit; if there is nothing to compute once; if a parameter is missing; if, with
            ``example_axis``, an operation mixes examples; if the function cannot be traced.

        Example:
          >>> import jax.numpy as jnp, optax_freeze as fz
          >>> loss = lambda params, x: jnp.sum(jnp.tanh(x @ params["encoder"]) @ params["head"])
          >>> params = {"encoder": jnp.ones((4, 8)), "head": jnp.ones((8, 1))}
          >>> [features] = jax.jit(fz.precompute(loss, "encoder").before)(params, jnp.ones((2, 4)))
          >>> features.shape
          (2, 8)
        """
        division = self._of_params(params, args, kwargs)
        return Features(division.before(), division.digest, _structs(params))

    def needed(self, params: PyTree, /, *args: Any, **kwargs: Any) -> PyTree:
        """Removes the frozen parameters that ``after`` does not read.

        Args:
          params: the full parameters, or their shapes.
          *args: the other arguments of the function, or their shapes.
          **kwargs: its keyword arguments.

        Returns:
          ``params`` with a hole (``optax.MaskedNode()``) in place of each frozen leaf that only ``before`` reads. A
          leaf frozen by rows whose frozen rows are not read is replaced by its trainable rows, as a ``Part``.

        Raises:
          ValueError: in the same cases as ``before``.

        Example:
          >>> import jax.numpy as jnp, optax_freeze as fz
          >>> loss = lambda params, x: jnp.sum(jnp.tanh(x @ params["encoder"]) @ params["head"])
          >>> params = {"encoder": jnp.ones((4, 2)), "head": jnp.ones((2, 1))}
          >>> fz.precompute(loss, "encoder").needed(params, jnp.ones((2, 4)))
          {'encoder': MaskedNode(), 'head': Array([[1.],
                 [1.]], dtype=float32)}
        """
        division = self._of_params(params, args, kwargs)
        plan, read_again = division.plan, division.read_again
        values, treedef = _tree.flatten(params)
        needed = [
            value if i in read_again else _without_frozen(selection, leaf, value)
            for i, (value, leaf, selection) in enumerate(zip(values, plan.leaves, plan.selections, strict=True))
        ]
        return jax.tree.unflatten(treedef, needed)

    def explain(self, params: PyTree, /, *args: Any, **kwargs: Any) -> CutExplanation:
        """Explains what is computed once, what is stored, and which operations prevent computing more once.

        Args:
          params: the full parameters, or their shapes.
          *args: the other arguments of the function, or their shapes.
          **kwargs: its keyword arguments.

        Returns:
          A :class:`optax_freeze.CutExplanation`. Print it, or draw it with ``plot()``.

        Raises:
          ValueError: in the same cases as ``before``.

        Example:
          >>> import jax.numpy as jnp, optax_freeze as fz
          >>> loss = lambda params, x: jnp.sum(jnp.tanh(x @ params["encoder"]) @ params["head"])
          >>> params = {"encoder": jnp.ones((4, 8)), "head": jnp.ones((8, 1))}
          >>> print(fz.precompute(loss, "encoder").explain(params, jnp.ones((2, 4))))
          computed once: 144 FLOP, 80.9 % of the forward pass
          computed in each step: 34 FLOP, 19.1 %
          stored: 1 array, 64 B
            float32 [2, 8], 64 B: tanh at ...
          not read in a step: 1 frozen leaf, 128 B
            encoder
          first on its path that cannot be computed once:
            dot_general at ...: depends on head, which trains
        """
        from optax_freeze._precompute.flops import flops_of_tasks

        division = self._of_params(params, args, kwargs)
        read_again = division.read_again
        made_by = {value: node for node in division.graph.nodes for value in node.outputs}
        features = [
            Feature(tuple(struct.shape), struct.dtype, _bytes(struct.shape, struct.dtype), str(made_by[value]))
            for struct, value in zip(division.features, division.cut.stored, strict=True)
        ]
        gone = [
            (leaf.path, _bytes(leaf.shape, leaf.dtype) - s.elements(leaf.shape) * leaf.dtype.itemsize)
            for i, (leaf, s) in enumerate(zip(division.plan.leaves, division.plan.selections, strict=True))
            if i not in read_again and leaf.shape is not None and (s is FROZEN or isinstance(s, RowIndex))
        ]
        return CutExplanation(
            tuple(features),
            flops_of_tasks(division.graph.tasks(division.cut.before)),
            flops_of_tasks(division.graph.tasks(division.cut.after)),
            tuple(path for path, _ in gone),
            sum(size for _, size in gone),
            tuple((str(node), why) for node, why in division.stopped_by),
        )

    def _of_params(self, params: PyTree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Division":
        """Divides the function for full parameters."""
        values = _tree.flatten(params)[0]
        fix = "give the full parameters here, and what `needed` returned to `after` alone"
        _tree.refuse_half_a_tree(params, "the features are computed from the full parameters", "the leaf", fix)
        plan = make_plan(params, self.frozen)
        return self._divide(plan, values, args, kwargs)

    def _divide(self, plan: Plan, values: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Division":
        from optax_freeze._precompute.divide import divide

        arguments, treedef = self.arguments.flatten(args, kwargs)
        return divide(self.fun, plan, values, arguments, treedef, self.example_axis)


class _After:
    """``after`` of :class:`Precomputed`: computes the result of the function from the features."""

    def __init__(self, once: Precomputed) -> None:
        self._once = once

    def __repr__(self) -> str:
        return f"{self._once!r}.after"

    def __call__(self, params: PyTree, features: PyTree, /, *args: Any, **kwargs: Any) -> Any:
        self._refuse_elsewhere((features, *args))
        plan, shapes = self._plan(params, features)
        pairs = zip(_tree.flatten(params)[0], shapes, strict=True)
        return self._run(plan, [shape if _tree.is_hole(x) else x for x, shape in pairs], features, args, kwargs)

    def refuse_gradient(self, plan: Plan, params: PyTree) -> None:
        """Raises ``ValueError`` if a gradient is taken of what is frozen here, where it would be zero."""
        values, treedef = _tree.flatten(params)
        if any(map(_tree.is_hole, values)):
            return
        own = make_plan(jax.tree.unflatten(treedef, list(map(_whole, values))), self._once.frozen)
        for leaf, theirs, selection in zip(plan.leaves, plan.selections, own.selections, strict=True):
            if selection is FROZEN and theirs is not FROZEN:
                raise value_error(
                    "the features were computed with a different spec",
                    at=leaf.path,
                    got="a leaf with more trainable elements",
                    expected=f"a leaf that {selection}, as in fz.precompute",
                    fix="pass the same `frozen` to fz.precompute and to the gradient",
                )

    def _refuse_elsewhere(self, args: tuple[Any, ...]) -> None:
        place = next((i for i, each in enumerate(args) if isinstance(each, Features)), 0)
        if place or not args:
            raise value_error(
                "the features come after the parameters",
                at=f"argument {place + 1}" if place else "the arguments",
                got="the features at this position" if place else "no features",
                expected="after(params, features, *args, **kwargs)",
                fix="pass the features first, then the other arguments of the function",
            )

    def _plan(self, params: PyTree, features: PyTree) -> tuple[Plan, list[Any]]:
        """The plan of the parameters, and their leaves, with a shape in place of each missing one."""
        values, treedef = _tree.flatten(params)
        known = features.leaves if isinstance(features, Features) else ()
        if any(map(_tree.is_hole, values)):
            if not known:
                raise value_error(
                    "the shapes of the missing parameters are not known",
                    at="features",
                    got=described(features),
                    expected="the features as `before` or features.read returned them",
                    fix="jax.tree.map keeps their type; or give the full parameters",
                )
            fix = "give what `needed` returned"
            _tree.refuse_other_paths(_tree.paths(params), [path for path, _ in known], "params", fix)
        shapes = [
            known[i][1] if _tree.is_hole(value) and known[i][1] is not None else _whole(value)
            for i, value in enumerate(values)
        ]
        return make_plan(jax.tree.unflatten(treedef, shapes), self._once.frozen), shapes

    def _run(
        self, plan: Plan, values: Sequence[Any], features: PyTree, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        division = self._once._divide(plan, values, args, kwargs)
        read_again = division.read_again
        for i, (leaf, selection, value) in enumerate(zip(plan.leaves, plan.selections, values, strict=True)):
            is_missing = isinstance(value, jax.ShapeDtypeStruct)
            trains = selection is not FROZEN and is_missing
            if trains or ((is_missing or isinstance(value, Part)) and i in read_again):
                node = read_again.get(i)
                raise value_error(
                    "a parameter is missing",
                    at=leaf.path,
                    got="a hole" if is_missing else "only the trainable rows",
                    expected="a trainable leaf" if trains else f"the leaf: it is read by {node or 'the result'}",
                    fix="give what `needed` returned, or the full parameters",
                )
        if isinstance(features, Features) and features.cut != division.digest:
            raise value_error(
                "the features were computed by another program",
                at="features",
                got=f"features of the program {features.cut[:12]}",
                expected=f"features of the program {division.digest[:12]}, of the same function, spec and shapes",
                fix="compute them with the same fz.precompute, and arguments of the same shapes",
            )
        arrays = jax.tree.leaves(features)
        got, expected = (
            [f"{a.dtype}{list(a.shape)}" for a in each if is_array(a)] for each in (arrays, division.features)
        )
        if got != expected or len(arrays) != len(got):
            raise value_error(
                "the features do not fit",
                at="features",
                got=", ".join(got) or described(features),
                expected=", ".join(expected),
                fix="give the features that `before` returned for this batch, as the argument after the parameters",
            )
        return division.after(arrays)


def precompute(
    fun: Callable[..., Any],
    frozen: Spec,
    recurring: int | str | Sequence[int | str] = 1,
    *,
    example_axis: int | None = None,
) -> Precomputed:
    """Divides a function into a part that is computed once for each batch, and a part that is computed in each step.

    In every epoch, a frozen encoder computes the same activations for the same batch. ``before`` computes them once.
    ``after`` continues from there, with the same value and the same gradient of the trainable parameters, up to
    rounding. The function is traced, so you need not change it. Every operation that depends only on frozen parameters
    and recurring arguments can be computed in ``before``. The features are chosen so that they have the fewest bytes (a
    minimum cut), where elementwise operations, reductions and changes of layout are repeated in ``after`` rather than
    stored.

    Args:
      fun: the function, called as ``fun(params, *args, **kwargs)``; it may return anything.
      frozen: the spec of the frozen parameters, in any form.
      recurring: the position (the parameters are 0) or name of the argument that has the same values whenever the
        features are used, such as the batch; or several positions or names. Any other argument, such as a random key,
        may differ each time.
      example_axis: the axis of the examples, which every recurring array must have. The features then have the examples
        along their first axis, so that they can be stored one by one and shuffled. Recurring Python numbers are part of
        the program. With None, the features belong to the batch as a whole.

    Returns:
      A :class:`optax_freeze.Precomputed`, with ``before``, ``after``, ``needed`` and ``explain``.

    Raises:
      TypeError: if ``fun`` is not a function, or ``recurring`` is not a position or a name.
      ValueError: if ``recurring`` includes the parameters. When the result is called: if the spec does not fit, if
        there is nothing to compute once, if a parameter that is read is missing, if the features do not belong to the
        program, or if, with ``example_axis``, an operation mixes examples or a recurring array has no such axis.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> def loss(params, batch):
      ...   return jnp.mean((jnp.tanh(batch @ params["encoder"]) @ params["head"] - 1) ** 2)
      >>> params, batch = {"encoder": jnp.ones((4, 8)), "head": jnp.ones((8, 1))}, jnp.ones((2, 4))
      >>> once = fz.precompute(loss, "encoder")
      >>> features = jax.jit(once.before)(params, batch)
      >>> value, grads = jax.jit(fz.value_and_grad(once.after, "encoder"))(params, features, batch)
      >>> bool(jnp.allclose(value, loss(params, batch))), grads["encoder"]
      (True, MaskedNode())
    """
    refuse_no_function(fun, frozen, "fz.precompute(fun, frozen)")
    if example_axis is not None:
        whole_number("example_axis", example_axis, fix="example_axis=0")
    return Precomputed(fun, frozen, recurring, example_axis)


def _without_frozen(selection: Selection, leaf: Leaf, value: Any) -> Any:
    """The leaf without its frozen part."""
    if selection is FROZEN:
        return value if leaf.dtype is None else HOLE
    if not isinstance(selection, RowIndex) or isinstance(value, Part):
        return value
    if not isinstance(value, jax.ShapeDtypeStruct):
        return selection.take(value)
    part = jax.eval_shape(selection.take, value)
    shape, sharding = part.values.shape, value.sharding and on_device(value.sharding)
    if isinstance(sharding, NamedSharding):
        sharding = fitting(sharding, len(shape), shape)
    return dataclasses.replace(part, values=jax.ShapeDtypeStruct(shape, part.dtype, sharding=sharding))


def _structs(params: PyTree) -> tuple[tuple[str, Any], ...]:
    """The path of each leaf, and its shape and dtype if it has them."""
    leaves = zip(_tree.leaves(params), _tree.flatten(params)[0], strict=True)
    return tuple((leaf.path, _struct(leaf, value) if leaf.shape is not None else None) for leaf, value in leaves)


def _struct(leaf: Leaf, value: Any) -> jax.ShapeDtypeStruct:
    assert leaf.shape is not None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=_tree.is_weak(value))


def _whole(value: Any) -> Any:
    """The shape of the full leaf for a ``Part``; any other value unchanged."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if isinstance(value, Part) else value


def _bytes(shape: Any, dtype: Any) -> int:
    return math.prod(shape) * dtype.itemsize
