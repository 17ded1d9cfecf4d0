"""What the equations of a program say where releases of JAX say it differently."""

from typing import Any


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a ``scan`` are the same in every step, and how many after them are carried.

    >>> import jax, jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda w, c, xs: jax.lax.scan(lambda c, x: (c * w + x, c), c, xs))(1.0, 2.0, jnp.ones(3))
    >>> scan_counts(jaxpr.eqns[-1].params)
    (1, 1)
    """
    if "ft_in" in params:  # since JAX 0.11
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]
