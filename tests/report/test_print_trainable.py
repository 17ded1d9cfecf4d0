"""The line of PEFT, with the numbers of a summary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_freeze as fz

PARAMS = {"embed": jnp.ones((1000, 4), jnp.bfloat16), "head": jnp.ones((4, 3)), "steps": jnp.int32(1)}
SHAPES = jax.eval_shape(lambda: PARAMS)
MASK = np.zeros((4, 3), bool)
MASK[0] = True


PART = fz.partition(PARAMS, {"embed": fz.rows(slice(990)), "head": False, "steps": True})[0]


@pytest.mark.parametrize(
    ("params", "frozen", "trainable", "elements", "percent"),
    [
        (PARAMS, "embed", "12", "4,013", "0.2990"),
        (PARAMS, False, "4,012", "4,013", "99.9751"),
        (SHAPES, True, "0", "4,013", "0.0000"),
        (SHAPES, fz.rules({"embed": ~fz.rows([1, 2]), "head": fz.elements(MASK)}), "17", "4,013", "0.4236"),
        (PART, False, "52", "52", "100.0000"),
        ({}, False, "0", "0", "0.0000"),
    ],
)
def test_the_line(capsys, params, frozen, trainable, elements, percent):
    assert fz.print_trainable(params, frozen) is None
    expected = f"trainable params: {trainable} || all params: {elements} || trainable%: {percent}\n"
    assert capsys.readouterr() == (expected, "")
