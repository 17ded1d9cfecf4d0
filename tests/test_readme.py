"""The README: all its code blocks and every expression in its table run."""

import pathlib
import re

import flax.linen as nn
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import optax_freeze
import optax_freeze.checkpoint
import optax_freeze.linen
import optax_freeze.nnx

README = pathlib.Path("README.md").read_text()
TABLE = README.split("## What you want")[1].split("\n## ")[0]
WRITTEN = [
    code for row in re.findall(r"^\| .* \| (`.*`) \|$", TABLE, re.MULTILINE) for code in re.findall("`([^`]*)`", row)
]


@pytest.fixture(scope="module")
def names():
    """The names that the code blocks define."""
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(block, namespace)
    return namespace


def test_it_prints_the_summary_and_its_table_is_found(names, capsys):
    print(names["fz"].summary(names["params"], names["frozen"], optax.adamw(1e-2)))
    assert "encoder/kernel" in capsys.readouterr().out
    assert float(names["value"]) == 1.0
    assert len(WRITTEN) >= 15


@pytest.mark.parametrize("code", WRITTEN)
def test_what_you_write(code, names, tmp_path):
    linen = nn.Sequential([optax_freeze.linen.Frozen(nn.Dense(8)), nn.Dense(1)])
    model = linen if "linen" in code else nnx.Dict(encoder=nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    mask = jnp.zeros((4, 8), bool)
    here = {**names, "nn": nn, "optax_freeze": optax_freeze, "model": model, "mask": mask, "directory": tmp_path}
    here["x"] = jnp.ones((2, 4))
    result = eval(code, here)
    if "fz.elements" in code or "fz.rows" in code or code.startswith(('"', "[", "fz.where", "fz.only")):
        names["fz"].resolve(names["params"], result)
