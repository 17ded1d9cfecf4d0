"""The blocks of ``docs/trainers.md``, executed with the real trainers, and what the page says of them."""

import importlib.metadata
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import bits

import optax_freeze as fz
from gallery import trainer_rows, trainers

PACKAGES = {
    "Flax": ["flax"],
    "Tunix": ["tunix"],
    "Kauldron": ["kauldron"],
    "Keras": ["keras", "keras_hub"],
    "Brax": ["brax"],
    "jax-privacy": ["jax_privacy"],
    "NetKet": ["netket"],
    "NumPyro": ["numpyro"],
    "MaxText": ["maxtext"],
}

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the packages
    pytest.mark.skipif(
        not importlib.util.find_spec("kauldron"), reason="the trainers are not installed (make gallery)"
    ),
]


@pytest.fixture(scope="module", params=trainers.TRAINERS)
def title(request):
    for package in PACKAGES[request.param]:
        pytest.importorskip(package, reason=f"{package} is not installed (make gallery)", exc_type=ImportError)
    return request.param


@pytest.fixture(scope="module")
def made(title):
    return trainers.TRAINERS[title]()


def test_the_table(title, made):
    (shown_kinds, *shown), (kinds, *measured) = trainers.shown(title), trainers.measured(made)
    assert set(shown_kinds.split(", ")) == set(kinds.split(", "))
    numbers = [
        [float(n.replace(",", "")) for n in re.findall(r"\d[\d,.]*", " ".join(row))] for row in (shown, measured)
    ]
    np.testing.assert_allclose(*numbers, rtol=0.1)  # compilers for other processors need other temporary memory
    if made.changed:
        flops, fewer, memory, less = numbers[0]
        assert fewer < flops
        assert less < memory


def test_with_the_change_there_is_no_leak(made):
    for step in [made.changed or made.own, *made.others]:
        audit = step.audit()
        assert audit, audit


def test_no_frozen_bit_moves_and_everything_else_trains(made):
    before, after = made.train()
    leaves = zip(*map(jax.tree.leaves, (fz.resolve(before, made.own.frozen), before, after)), strict=True)
    trained = {True: [], False: []}
    for is_frozen, old, new in leaves:
        trained[is_frozen].append(bits(old) != bits(new))
    assert trained[True]
    assert trained[False]
    assert not any(trained[True])
    assert all(trained[False])


def test_the_page_names_the_versions(title):
    page = trainers.PAGE.read_text(encoding="utf-8")
    for package in PACKAGES[title]:
        name = {"tunix": "google-tunix"}.get(package, package.replace("_", "-"))
        assert f"{name} {importlib.metadata.version(name)}" in page


def test_every_block_is_executed():
    page = trainers.PAGE.read_text(encoding="utf-8")
    numbers = {title: len(trainers.blocks(title)) for title in trainers.TRAINERS}
    assert numbers == dict.fromkeys(trainers.TRAINERS, 3) | {"Keras": 2, "MaxText": 5}
    assert page.count("```") == 2 * (sum(numbers.values()) + 2)  # the section "In a trainer"


@pytest.fixture(scope="module", params=[*trainer_rows.ROWS, "MaxText, Linen"])
def rows(request):
    title = request.param.split(",")[0]
    for package in PACKAGES[title]:
        pytest.importorskip(package, reason=f"{package} is not installed (make gallery)", exc_type=ImportError)
    return title, trainer_rows.maxtext_with(linen=True) if "," in request.param else trainer_rows.ROWS[title]()


def test_rows_cost_rows(rows):
    title, ways = rows
    shown, measured = (
        [float(re.sub("[^0-9.]", "", cell)) for cell in cells]
        for cells in (trainer_rows.shown(title), trainer_rows.measured(ways))
    )
    np.testing.assert_allclose(shown, measured, rtol=0.1)
    own, optimizer, both = measured[:3]
    assert both < optimizer
    assert both < own


def test_frozen_rows_keep_their_bits_and_the_others_train(rows):
    _, ways = rows
    before, after = trainers.run_steps(ways.both, ways.select)
    fz.assert_frozen(before, after, ways.both.frozen)
    (old, _), (new, _) = (fz.partition(tree, ways.both.frozen) for tree in (before, after))
    assert all(bits(a) != bits(b) for a, b in zip(*map(jax.tree.leaves, (old, new)), strict=True))


def test_with_both_wrappers_rows_have_no_leak(rows):
    title, ways = rows
    if title == "MaxText":
        pytest.skip("it takes minutes")
    assert not ways.own.audit()
    assert ways.both.audit(), ways.both.audit()


def test_the_geometric_tensors_of_netket_are_equal():
    """That of Jacobians is computed in reverse mode, that on the fly in both."""
    pytest.importorskip("netket", reason="netket is not installed (make gallery)")
    names = trainers.netket().names
    vstate, qgt = trainers.execute("NetKet", 1, names)["vstate"], names["nk"].optimizer.qgt
    vector = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), vstate.parameters)
    kinds = qgt.QGTOnTheFly, qgt.QGTJacobianDense
    tensors = [vstate.quantum_geometric_tensor(kind(diag_shift=0.01)) for kind in kinds]
    on_the_fly, jacobian = (jax.jit(lambda tensor: tensor @ vector)(tensor) for tensor in tensors)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), on_the_fly, jacobian)
