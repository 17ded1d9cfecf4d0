"""Traces a function of partly frozen parameters and other arguments, each array of which is an input of the program."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import value_error
from optax_freeze._precompute.arguments import Argument
from optax_freeze._program.function import Traced, needs_value
from optax_freeze._program.regions import Region, Rows, region_of
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import FROZEN, RowIndex
from optax_freeze._spec.tree import Part, is_hole


class Input(NamedTuple):
    """An input of the program."""

    value: Any  # an array, a shape, or the trainable rows as a part
    name: str
    why: str = ""  # the value is not known beforehand; empty if it is known
    leaf: int | None = None  # the number of the leaf, if it is frozen or has frozen rows
    trainable: Any = None  # the trainable rows of such a leaf

    def is_known(self, region: Region) -> bool:
        """Whether a region of the value is known beforehand."""
        if not self.why or self.trainable is None:
            return not self.why
        is_rows = isinstance(region, Rows) and region.axis == self.trainable.axis
        return is_rows and not np.intersect1d(region.numbers, self.trainable.numbers).size  # type: ignore[attr-defined]

    def is_frozen(self, region: Region) -> bool:
        """Whether a region of a leaf has frozen elements."""
        return self.trainable is None or not isinstance(region, Rows) or region.within(self.trainable) is None

    @property
    def struct(self) -> Any:
        """The value to trace the function with."""
        return jax.ShapeDtypeStruct(self.value.shape, self.value.dtype) if isinstance(self.value, Part) else self.value


def inputs_of(plan: Plan, values: Sequence[Any]) -> list[Input]:
    """The arrays of the parameters; a hole gives the shape of its leaf."""
    inputs = []
    for i, (leaf, selection, value) in enumerate(zip(plan.leaves, plan.selections, values, strict=True)):
        if selection is FROZEN and leaf.dtype is None:
            continue
        value = leaf.struct if is_hole(value) else value
        trains = f"{leaf.path or 'the parameters'}, which trains"
        if selection is FROZEN:
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            why = f"{leaf.path}, a random key among the parameters" if is_key else ""
            inputs.append(Input(value, leaf.path, why, i))
        elif isinstance(selection, RowIndex):
            inputs.append(Input(value, leaf.path, trains, i, region_of(selection)))
        else:
            inputs.append(Input(value, leaf.path, trains))
    return inputs


def traced(
    fun: Any, plan: Plan, values: Sequence[Any], arguments: Sequence[Argument], treedef: Any, inputs: Any
) -> Traced:
    """Traces ``fun(params, *args, **kwargs)``."""

    def of_inputs(*arrays: Any) -> Any:
        left = iter(arrays)
        leaves = zip(plan.leaves, plan.selections, values, strict=True)
        filled = [x if s is FROZEN and leaf.dtype is None else next(left) for leaf, s, x in leaves]
        given = [next(left) if argument.is_input else argument.value for argument in arguments]
        args, kwargs = jax.tree.unflatten(treedef, given)
        return fun(jax.tree.unflatten(plan.treedef, filled), *args, **kwargs)

    try:
        return Traced(of_inputs, [given.struct for given in inputs], enter_remat=False)
    except Exception as error:
        if not needs_value(error):
            raise
        raise value_error(
            "the function cannot be traced",
            at=getattr(fun, "__qualname__", type(fun).__name__),
            got=f"{type(error).__name__}: Python needs the value of a traced array",
            expected="a function that jax.jit can trace",
            fix="if Python branches on an argument, name it in `recurring` and pass a Python value",
        ) from error
