"""The operations of a program as words and sizes, the same in every process."""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_freeze._errors import is_int
from optax_freeze._jax_internals import FUNCTIONS, ClosedJaxpr, Jaxpr, Literal, closed, operation_of
from optax_freeze._program.regions import Empty
from optax_freeze._program.trace import flatten

Text: TypeAlias = list[str | int]

UNKNOWN = "unknown"
"""Stands for what cannot be compared: a Python function, or a constant whose values this process does not have."""


def is_comparable(eqn: Any) -> bool:
    """Whether an operation can be told from others."""
    return UNKNOWN not in of_program([(eqn, (), ())], {}, of_type, ())


def has_values(const: Any) -> bool:
    """Whether this process knows the values of a constant."""
    return not isinstance(const, Tracer) and getattr(const, "is_fully_addressable", True)


def values_of(const: Any) -> np.ndarray | None:
    """The values of a constant, if this process knows them."""
    if not has_values(const):
        return None
    is_key = hasattr(const, "dtype") and jnp.issubdtype(const.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(const) if is_key else const)


def of_constant(const: Any) -> str:
    array = values_of(const)
    if array is None:
        return UNKNOWN
    bits = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return f"constant {array.dtype} {hashlib.sha256(bits.data).hexdigest()}"


def of_program(
    operations: Iterable[Any], names: dict[Any, str], type_of: Callable[[Any], Iterator[str | int]], outputs: Any
) -> Iterator[str | int]:
    """Operations ``(eqn, operands, results)`` on values, of which some have ``names``."""
    count = itertools.count()

    def of(x: Any) -> Iterator[str | int]:
        if x is None or isinstance(x, Literal):
            yield "" if x is None else of_constant(x.val)
        elif isinstance(x, Empty):
            yield from ("empty", str(x.aval.dtype), *x.shape)
        else:
            names[x] = names.get(x) or f"%{next(count)}"
            yield names[x]
            yield from type_of(x)

    for eqn, operands, results in operations:
        given = [x for x in operands if x is not None]
        if _computes_nothing(eqn) and not any(isinstance(x, Literal | Empty) for x in given):
            names |= {result: names[x] for result, x in zip(results, given, strict=True)}
            continue
        name, params = operation_of(eqn)
        yield name
        yield from words({key: x for key, x in params.items() if key not in FUNCTIONS})
        for x in (*operands, *results):
            yield from of(x)
    for x in outputs:
        yield from of(x)


def _computes_nothing(eqn: Any) -> bool:
    """Whether an operation marks values as varying over a mesh, or an array as not made of a Python number."""
    is_conversion = eqn.primitive is jax.lax.convert_element_type_p and eqn.avals_in[0].dtype == eqn.avals_out[0].dtype
    return is_conversion or eqn.primitive.name == "pvary"


def of_type(aval: Any) -> Iterator[str | int]:
    yield str(aval.dtype) if hasattr(aval, "dtype") else str(aval)
    yield from getattr(aval, "shape", ())


def words(value: Any) -> Iterator[str | int]:
    """A parameter of an operation, the same in every process. Ints in a tuple are sizes, others are values."""
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        program = flatten(closed(value))
        names = {n: f"input {n}" for n in range(program.num_inputs)}
        names |= {n: of_constant(const) for n, const in program.consts.items()}
        operations = ((eqn, eqn.inputs, eqn.outputs) for eqn in program.eqns)
        yield from of_program(operations, names, lambda n: of_type(program.avals[n]), program.outputs)
    elif hasattr(value, "key_shape"):  # an implementation of random keys
        yield value.name
    elif isinstance(value, dict):
        for name in sorted(value):
            if name != "name" and "sharding" not in name:
                yield name
                yield from words(value[name])
    elif isinstance(value, (tuple, list, frozenset)):
        yield "("
        for item in sorted(value, key=repr) if isinstance(value, frozenset) else value:
            yield from [int(item)] if is_int(item) else words(item)
        yield ")"
    elif isinstance(value, (np.ndarray, jax.Array)):
        yield of_constant(value)
    elif hasattr(value, "jaxpr"):  # a function that JAX has traced
        yield from words(value.jaxpr)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value).__name__
        yield from words({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    else:
        text = repr(value)
        is_function = callable(value) and not isinstance(value, type) and not hasattr(value, "axis_names")  # a mesh
        yield UNKNOWN if " at 0x" in text or is_function else text
