"""Computes everything that depends only on frozen parameters and a batch once, instead of in every epoch.

The transfer-learning guides of Keras and Flax split the model by hand to store the features of a frozen encoder. Here
the loss stays as it is: it is traced, and its program is divided.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from optax_freeze._errors import described, is_array, is_concrete, value_error, whole_number
from optax_freeze._gradient.argnums import parameters_first, refuse_several
from optax_freeze._gradient.grad import refuse_no_function
from optax_freeze._precompute.cut_explanation import CutExplanation
from optax_freeze._precompute.given_features import Features, fitting_arrays, refuse_missing, with_shapes
from optax_freeze._precompute.inputs import Arguments, parameters
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import on_device
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.selection import FROZEN, RowIndex, Selection
from optax_freeze._spec.sharding import fitting
from optax_freeze._spec.tree import MASKED_NODE, Leaf, Part, PyTree

if TYPE_CHECKING:
    from optax_freeze._precompute.divide import Division

_AFTER_TRAINING = "pass what `needed` returned for these parameters, after training"


class Precomputed:
    """A function divided into ``before``, which is computed once for each batch, and ``after``, the rest.

    Returned by :func:`optax_freeze.precompute`.

    Attributes:
      fun: the function.
      frozen: the spec of its frozen parameters.
      recurring: the positions or names of the arguments with the same values whenever the features are used.
      example_axis: the axis of the examples in the recurring arguments, or None.
      argnums: the position of the parameters among the arguments of the function. The methods take them first.

    Example:
      >>> import optax_freeze as fz
      >>> def loss(params, x):
      ...     return (x @ params["encoder"] @ params["head"]).sum()
      >>> fz.precompute(loss, "encoder")
      fz.precompute(loss, 'encoder')
    """

    def __init__(
        self, fun: Callable[..., Any], frozen: Spec, recurring: Any, example_axis: int | None, argnums: int
    ) -> None:
        self.fun, self.frozen, self.recurring, self.example_axis = fun, frozen, recurring, example_axis
        self.argnums, self.arguments = argnums, Arguments(fun, argnums, recurring)

    def __repr__(self) -> str:
        name = getattr(self.fun, "__qualname__", type(self.fun).__name__)
        return f"fz.precompute({name}, {described(self.frozen)})"

    def before(self, params: PyTree, /, *args: Any, **kwargs: Any) -> Features:
        """Computes the features of a batch: the values that are stored and reused. Call it inside ``jax.jit``.

        Args:
          params: the full parameters.
          *args: the other arguments of the function; ``**kwargs``: its keyword arguments.

        Returns:
          The features: a tuple of arrays. With ``example_axis``, the examples are along the first axis of each array.

        Raises:
          ValueError: if the spec does not fit; if there is nothing to compute once; if a parameter is missing; if, with
            ``example_axis``, an operation mixes examples or a recurring array has no such axis; if the function cannot
            be traced.
        """
        division = self._of_params(params, args, kwargs)
        pairs = zip(division.plan.leaves, _tree.flatten(params)[0], strict=True)
        return Features(division.before(), division.digest, [(leaf.path, _struct(leaf, x)) for leaf, x in pairs])

    def after(self, params: PyTree, features: PyTree, /, *args: Any, **kwargs: Any) -> Any:
        """Computes the result of the function from the features.

        Frozen leaves that only ``before`` reads may be ``MaskedNode``, and arguments that only ``before`` reads
        may be shapes (``jax.ShapeDtypeStruct``). A gradient with respect to a frozen leaf is an error. That of frozen
        rows from which features were computed, such as by ``jax.grad`` of the whole leaf, is NaN: it would lack the
        path through the features.

        Raises:
          ValueError: if a parameter that is read is missing, or if the features do not belong to this program.
        """
        place = next((i for i, x in enumerate((features, *args)) if isinstance(x, Features)), 0)
        if place:
            raise value_error(
                "the features come after the parameters",
                at=f"argument {place + 1}",
                got="the features at this position",
                expected="after(params, features, *args, **kwargs)",
                fix="pass the features first, then the other arguments of the function",
            )
        values, treedef = with_shapes(params, features)
        plan = make_plan(jax.tree.unflatten(treedef, values), self.frozen).in_state
        division = self._divide(plan, values, args, kwargs)
        refuse_missing(division, values)
        return division.after(fitting_arrays(features, division))

    def needed(self, params: PyTree, /, *args: Any, **kwargs: Any) -> PyTree:
        """Removes the frozen parameters that ``after`` does not read.

        Takes the arguments of ``before``, or their shapes, and raises the same errors.

        Returns:
          ``params`` with ``optax.MaskedNode()`` in place of each frozen leaf that only ``before`` reads. A leaf frozen
          by rows whose frozen rows are not read is replaced by its trainable rows, as a ``Part``.

        Example:
          >>> import jax.numpy as jnp, optax_freeze as fz
          >>> loss = lambda params, x: jnp.sum(jnp.tanh(x @ params["encoder"]) @ params["head"])
          >>> params = {"encoder": jnp.ones((4, 2)), "head": jnp.ones((2, 1))}
          >>> fz.precompute(loss, "encoder").needed(params, jnp.ones((2, 4)))
          {'encoder': MaskedNode(), 'head': Array([[1.],
                 [1.]], dtype=float32)}
        """
        division = self._of_params(params, args, kwargs)
        values, treedef = _tree.flatten(params)
        plan, read_again = division.plan, division.read_again
        needed = [
            value if i in read_again else _without_frozen(selection, leaf, value)
            for i, (leaf, selection, value) in enumerate(zip(plan.leaves, plan.selections, values, strict=True))
        ]
        return jax.tree.unflatten(treedef, needed)

    def combine(self, trained: PyTree, params: PyTree) -> PyTree:
        """Combines the parameters that were trained with the frozen ones that :meth:`needed` removed.

        Args:
          trained: what ``needed`` returned, after training.
          params: the parameters that were passed to ``needed``. Only leaves that ``trained`` does not have in full are
            read, so a step may have donated, and thus deleted, the others.

        Returns:
          The full parameters: the leaves of ``trained``, and those of ``params`` in place of each ``MaskedNode`` and
          around the trainable rows of a ``Part``.

        Raises:
          ValueError: if the trees do not belong together, or a leaf of ``params`` that is read has been deleted.

        Example:
          >>> import jax.numpy as jnp, optax_freeze as fz
          >>> loss = lambda params, x: jnp.sum(jnp.tanh(x @ params["encoder"]) @ params["head"])
          >>> params = {"encoder": jnp.ones((1, 2)), "head": jnp.zeros(2)}
          >>> once = fz.precompute(loss, "encoder")
          >>> small = once.needed(params, jnp.ones((2, 1)))
          >>> once.combine({**small, "head": jnp.ones(2)}, params)
          {'encoder': Array([[1., 1.]], dtype=float32), 'head': Array([1., 1.], dtype=float32)}
        """
        plan = full_plan(params, self.frozen)
        _tree.refuse_other_paths(_tree.paths(trained), [leaf.path for leaf in plan.leaves], "trained", _AFTER_TRAINING)
        kept, _ = plan.align(trained, "trained", _AFTER_TRAINING)
        values, treedef = _tree.flatten(params)
        return jax.tree.unflatten(treedef, list(map(_combined, plan.leaves, plan.selections, kept, values)))

    def explain(self, params: PyTree, /, *args: Any, **kwargs: Any) -> CutExplanation:
        """Explains what is computed once, what is stored, and which operations prevent computing more once.

        Takes the arguments of ``before``, or their shapes, and raises the same errors.

        Returns:
          An :class:`optax_freeze.typing.Explanation`, to be printed. ``plot(ax=None)`` draws the operations computed
          once and in each step. Its attributes: ``features`` (of each stored value ``shape``, ``dtype``, ``bytes`` and
          ``operation``) and their ``bytes``; ``flops_before`` and ``flops_after``, of the forward pass, computed once
          and in each step; ``not_needed``, the paths of leaves of which a step no longer reads the frozen elements, and
          ``not_needed_bytes``; ``stopped_by``, on each path the first operation that cannot be computed once, and why.
        """
        return self._of_params(params, args, kwargs).explanation

    def _of_params(self, params: PyTree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Division":
        return self._divide(full_plan(params, self.frozen), _tree.flatten(params)[0], args, kwargs)

    def _divide(self, plan: Plan, values: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Division":
        from optax_freeze._precompute.divide import divide

        arguments, treedef = self.arguments.flatten(args, kwargs)
        return divide(
            parameters_first(self.fun, self.argnums),
            plan,
            treedef,
            [*parameters(plan, values), *arguments],
            self.example_axis,
        )


def precompute(
    fun: Callable[..., Any],
    frozen: Spec,
    recurring: int | str | Sequence[int | str] | None = None,
    *,
    argnums: int = 0,
    example_axis: int | None = None,
) -> Precomputed:
    """Divides a function into a part that is computed once for each batch, and a part that is computed in each step.

    In every epoch, a frozen encoder computes the same activations for the same batch. ``before`` computes them once.
    ``after`` continues from there, with the same value and the same gradient of the trainable parameters, up to
    rounding. The function is traced, so you need not change it. It is divided where the fewest bytes have to be stored
    (a minimum cut); elementwise operations, reductions and changes of layout are repeated in ``after`` if that saves
    bytes.

    Args:
      fun: the function, called as ``fun(params, *args, **kwargs)``, or with the parameters at ``argnums``. It may
        return anything, such as a loss, logits, or a loss with auxiliary outputs (there is no ``has_aux`` here);
        ``after`` returns the same.
      frozen: the spec of the frozen parameters, in any form.
      recurring: the position among all arguments of ``fun``, or the name, of the argument that has the same values
        whenever the features are used, such as the batch; or several positions or names. Any other argument, such as a
        random key, may differ each time. The default is the first argument that is not the parameters.
      argnums: the position of the parameters among the arguments of ``fun``, from 0 on. What is returned takes them
        first, then the other arguments in their order.
      example_axis: the axis of the examples, which every recurring array must have. The features then have the examples
        along their first axis, so that they can be stored one by one and shuffled. Recurring Python numbers are part of
        the program. With None, the features belong to the batch as a whole.

    Returns:
      A :class:`optax_freeze.typing.Precomputed`, with ``before``, ``after``, ``needed``, ``combine`` and ``explain``.

    Raises:
      TypeError: if ``fun`` is not a function, or ``recurring`` is not a position or a name.
      ValueError: if ``argnums`` is not a single int, ``argnums`` or ``example_axis`` is negative, or ``recurring``
        includes the parameters; when a method is called, if ``argnums`` is out of range.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> loss = lambda params, batch: jnp.mean(jnp.tanh(batch @ params["encoder"]) @ params["head"])
      >>> params, batch = {"encoder": jnp.ones((4, 8)), "head": jnp.ones((8, 1))}, jnp.ones((2, 4))
      >>> once = fz.precompute(loss, "encoder")
      >>> features = jax.jit(once.before)(params, batch)
      >>> value, grads = jax.jit(fz.value_and_grad(once.after, "encoder"))(params, features, batch)
      >>> bool(jnp.allclose(value, loss(params, batch))), grads["encoder"]
      (True, MaskedNode())
    """
    refuse_no_function(fun, frozen, "fz.precompute(fun, frozen)")
    refuse_several(argnums)
    whole_number("argnums", argnums, fix="count from the first argument: argnums=1 for loss(batch, params)")
    if example_axis is not None:
        whole_number("example_axis", example_axis, fix="example_axis=0")
    if recurring is None:
        recurring = 1 if argnums == 0 else 0
    return Precomputed(fun, frozen, recurring, example_axis, argnums)


def _struct(leaf: Leaf, value: Any) -> jax.ShapeDtypeStruct | None:
    if leaf.shape is None:
        return None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=_tree.is_weak(value))


def full_plan(params: PyTree, frozen: Spec) -> Plan:
    """The plan of parameters without ``MaskedNode``."""
    fix = "give the full parameters here, and what `needed` returned to `after` alone"
    _tree.refuse_half_a_tree(params, "the features are computed from the full parameters", "the leaf", fix)
    return make_plan(params, frozen).in_state


def _combined(leaf: Leaf, selection: Selection, trained: Any, value: Any) -> Any:
    is_part = isinstance(trained, Part)
    if not is_part and trained is not None and not _tree.is_masked_node(trained):
        if is_array(trained) and trained.shape != leaf.shape:
            raise value_error(
                "trained: a leaf has another shape",
                at=leaf.path,
                got=described(trained),
                expected=f"an array of shape {leaf.shape}",
                fix=_AFTER_TRAINING,
            )
        return trained
    if is_concrete(value) and isinstance(value, jax.Array) and value.is_deleted():
        raise value_error(
            "params: a frozen leaf has been deleted",
            at=leaf.path,
            got="an array that was donated",
            expected="its values: `trained` does not have them",
            fix="donate what `needed` returned, and not the full parameters",
        )
    return selection.put(value, trained) if is_part else value


def _without_frozen(selection: Selection, leaf: Leaf, value: Any) -> Any:
    if not isinstance(selection, RowIndex):
        return MASKED_NODE if selection is FROZEN and leaf.dtype is not None else value
    if not isinstance(value, jax.ShapeDtypeStruct):
        return selection.take(value)
    part = jax.eval_shape(selection.take, value)
    shape, sharding = part.values.shape, value.sharding and on_device(value.sharding)
    if isinstance(sharding, NamedSharding):
        sharding = fitting(sharding, len(shape), shape)
    return dataclasses.replace(part, values=jax.ShapeDtypeStruct(shape, part.dtype, sharding=sharding))
