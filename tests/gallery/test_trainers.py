"""The blocks of ``docs/trainers.md``, executed with the real trainers, and what the page says of them."""

import importlib.metadata
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits

import optax_freeze as fz
from gallery import trainers

PACKAGES = {
    "Flax": ["flax"],
    "Tunix": ["tunix"],
    "Kauldron": ["kauldron"],
    "Keras": ["keras", "keras_hub"],
    "Brax": ["brax"],
    "jax-privacy": ["jax_privacy"],
    "MaxText": ["maxtext"],
}

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the packages
    pytest.mark.skipif(
        not importlib.util.find_spec("kauldron"), reason="the trainers are not installed (make gallery)"
    ),
]


@pytest.fixture(scope="module", params=trainers.TITLES)
def title(request):
    for package in PACKAGES[request.param]:
        pytest.importorskip(package, reason=f"{package} is not installed (make gallery)", exc_type=ImportError)
    return request.param


@pytest.fixture(scope="module")
def section(title):
    return trainers.run(title)


def test_the_blocks_print_what_the_page_shows(section):
    shown = [(text.strip(), printed.strip()) for text, printed in zip(section.shown, section.printed, strict=True)]
    assert [text for text, _ in shown if text]
    assert [(text, printed) for text, printed in shown if text and text != printed] == []


def test_no_frozen_bit_moves_and_everything_else_trains(section):
    before, after, frozen = (section.names[name] for name in ("before", "after", "frozen"))
    leaves = zip(*map(jax.tree.leaves, (fz.resolve(before, frozen), before, after)), strict=True)
    trained = {True: [], False: []}
    for is_frozen, old, new in leaves:
        trained[is_frozen].append(bits(old) != bits(new))
    assert trained[True]
    assert trained[False]
    assert not any(trained[True])
    assert all(trained[False])


def test_the_table(title, section):
    page = trainers.PAGE.read_text(encoding="utf-8").split(trainers.HEAD)[1]
    shown, measured = re.search(rf"^\| {title} \|.*$", page, re.M)[0], trainers.row(title, section)
    numbers = [[float(n.replace(",", "")) for n in re.findall(r"\d[\d,.]*", row)] for row in (shown, measured)]
    np.testing.assert_allclose(*numbers, rtol=0.1)  # compilers for other processors need other temporary memory
    assert title in trainers.UNCHANGED or (numbers[0][2] < numbers[0][0] and numbers[0][3] < numbers[0][1])


def test_the_page_names_the_versions(title):
    page = trainers.PAGE.read_text(encoding="utf-8")
    for package in PACKAGES[title]:
        name = {"tunix": "google-tunix"}.get(package, package.replace("_", "-"))
        assert f"{name} {importlib.metadata.version(name)}" in page


@pytest.mark.parametrize("title", ["Flax", "Kauldron"])
def test_rows_train_in_a_trainer_of_an_optax_optimizer(title):
    names = trainers.run(title).names
    rows = fz.rules({"**/encoder/kernel": fz.rows(slice(0, 200)), "**/head/**": False}, default=True)
    tx = fz.freeze(optax.adamw(1e-2), rows)
    if title == "Flax":
        net, params, batch = names["net"], names["params"], names["x"]
        state, step = names["TrainState"].create(apply_fn=net.apply, params=params, tx=tx), names["step"]
    else:
        trainer = names["trainer_of"](tx)
        state, step, batch = trainer.trainstep.init(names["shapes"]), trainer.trainstep.step, names["batch"]
    before = jax.tree.map(jnp.copy, state.params)
    for _ in range(3):
        state, _ = step(state, batch)
    fz.assert_frozen(before, state.params, rows)
    [old, new] = (dict(jax.tree.leaves_with_path(tree)) for tree in (before, state.params))
    moved = {jax.tree_util.keystr(path): np.asarray(old[path] != new[path]) for path in old}
    [kernel] = [value for path, value in moved.items() if "encoder" in path and "kernel" in path]
    assert not kernel[:200].any()
    assert kernel[200:].all()


def test_rows_train_in_tunix():
    names = trainers.run("Tunix").names
    rows = fz.rules({"embed/embedding": fz.rows(slice(0, 200)), "head/**": False}, default=True)
    model, tokens = names["Model"](), names["tokens"]
    trainer = names["trainer_of"](model, fz.freeze(optax.adamw(1e-2), rows), gradient_accumulation_steps=2, max_steps=2)
    before = names["nnx"].to_pure_dict(names["nnx"].clone(names["nnx"].state(model)))
    trainer.train([tokens] * 4)
    after = names["nnx"].to_pure_dict(names["nnx"].state(model))
    fz.assert_frozen(before, after, rows)
    moved = np.asarray(before["embed"]["embedding"] != after["embed"]["embedding"]).any(axis=1)
    assert not moved[:200].any()
    assert moved[200:].any()  # of tokens in the batch
