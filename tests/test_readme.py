"""The README: all its code blocks run, and what it says of the first step and of its fix is true."""

import pathlib
import re

import jax
import numpy as np

README = pathlib.Path("README.md").read_text()


def test_the_first_step_changes_the_encoder_and_the_second_does_not(capsys):
    namespace, after = {}, []
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(block, namespace)
        kept = {name: namespace.get(name) for name in ("params", "after", "value")}
        after.append(jax.tree.map(np.array, kept))  # the second step donates its parameters
    assert "moved: ['encoder', 'head']\n" in capsys.readouterr().out
    start, wrong, right, *others = after
    assert (wrong["after"]["encoder"] != start["params"]["encoder"]).all()
    assert right["params"]["encoder"].tobytes() == start["params"]["encoder"].tobytes()
    assert (right["params"]["head"] != start["params"]["head"]).all()
    assert right["value"] == 1.0
    assert len(others) == 5
