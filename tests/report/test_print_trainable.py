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


def line(capsys, *args, **options):
    assert fz.print_trainable(*args, **options) is None
    captured = capsys.readouterr()
    assert not captured.err
    return captured.out


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        ("embed", "trainable params: 12 || all params: 4,013 || trainable%: 0.2990\n"),
        (False, "trainable params: 4,012 || all params: 4,013 || trainable%: 99.9751\n"),
        (True, "trainable params: 0 || all params: 4,013 || trainable%: 0.0000\n"),
        (
            fz.rules({"embed": ~fz.rows([1, 2]), "head": fz.elements(MASK)}),
            "trainable params: 17 || all params: 4,013 || trainable%: 0.4236\n",
        ),
    ],
)
def test_the_line(capsys, frozen, expected):
    assert line(capsys, PARAMS, frozen) == expected
    assert line(capsys, SHAPES, frozen) == expected


def test_it_counts_what_a_summary_counts(capsys):
    trainable, _ = fz.partition(PARAMS, {"embed": fz.rows(slice(990)), "head": False, "steps": True})
    summary = fz.summary(trainable, False)
    assert line(capsys, trainable, False).startswith(
        f"trainable params: {summary.trainable_elements} || all params: {summary.elements} ||"
    )


def test_nothing_to_count(capsys):
    assert line(capsys, {}, False) == "trainable params: 0 || all params: 0 || trainable%: 0.0000\n"


def test_tied_leaves(capsys):
    """The error is in ``wrong_calls.md``."""
    w = jnp.ones(2)
    assert line(capsys, {"a": w, "b": w}, "a", tied="ignore").startswith("trainable params: 2 || all params: 4 ")
