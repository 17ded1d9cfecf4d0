"""Every optimizer of the installed Optax with every form of spec: a subset of the matrix, and its pages.

``make compatibility`` runs every cell and writes ``optimizer_matrix.md``.
"""

import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
import write_compatibility as page
from matrix import DTYPES, MARKS, MODES, OPTIMIZERS, SPECS, Cell, pairwise_cells, run

import optax_freeze as fz

FACTORS = dict(zip(Cell._fields, (OPTIMIZERS, SPECS, DTYPES, MODES), strict=True))
RECORD = page.parse(page.PAGE.read_text())
DOCUMENTATION = pathlib.Path("docs/compatibility.md").read_text()


def numbers(version):
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_on_what_trains_alone(name):
    if list(OPTIMIZERS).index(name) % 10 == 0:
        jax.clear_caches()  # a process can map only a limited number of compiled programs
    by_itself = {cell: run(cell) for cell in pairwise_cells() if cell.optimizer == name}
    if RECORD.optax == optax.__version__:
        expected = {cell: RECORD.limits.get(cell, "") for cell in by_itself}
        assert {cell: page.one_line(error) for cell, error in by_itself.items()} == expected


def test_the_cover_has_every_pair():
    cells = list(pairwise_cells())
    for a, b in [*itertools.combinations(Cell._fields[1:], 2), ("optimizer", "dtype")]:
        pairs = {(getattr(cell, a), getattr(cell, b)) for cell in cells}
        assert pairs == set(itertools.product(FACTORS[a], FACTORS[b])), (a, b)
    for name in OPTIMIZERS:
        met = [cell for cell in cells if cell.optimizer == name]
        assert len({cell.mode for cell in met}) == 3, name
        assert len({cell.spec for cell in met}) >= 2, name


class TestThePage:
    def test_keeps_a_record(self):
        error = page.one_line("an `error`\n  | of two lines")
        limits = {Cell("adam", spec, "float32", "jit"): error for spec in SPECS[:2]}
        record = page.Record("1.2", "3.4", {"adam": ("zeros", "shape"), "sgd": ()}, limits)
        assert page.parse(page.render(record)) == record
        assert page.parse(page.render(record._replace(limits={}))).limits == {}

    def test_is_what_its_script_writes(self):
        assert page.render(RECORD) == page.PAGE.read_text()

    def test_agrees_with_the_documentation(self):
        _, optimizers = DOCUMENTATION.split("\n## Optimizers\n")
        rows = re.findall(r"^\| (\w+) \| (`.*?`) \|", optimizers, re.MULTILINE)
        expected = {mark: {name for name, marks in RECORD.optimizers.items() if mark in marks} for mark in MARKS}
        expected["errors"] = {cell.optimizer for cell in RECORD.limits}
        assert {what: set(re.findall(r"`([\w.]+)`", names)) for what, names in rows} == expected
        assert f"All {len(RECORD.optimizers)} optimizers" in optimizers
        assert f"[{len(RECORD.optimizers) * len(SPECS) * len(DTYPES) * len(MODES):,} combinations]" in optimizers

    def test_lists_the_installed_optimizers(self):
        if numbers(optax.__version__) < numbers(RECORD.optax):
            pytest.skip(f"the page is of Optax {RECORD.optax}, newer than {optax.__version__}")
        assert set(RECORD.optimizers) == set(OPTIMIZERS), "stale: run `make compatibility`"

    @pytest.mark.parametrize(
        "name",
        sorted({"adam", "adafactor", "contrib.galore", "contrib.muon", "lamb", "noisy_sgd", "sm3"} & {*OPTIMIZERS}),
    )
    @pytest.mark.parametrize("mark", MARKS)
    def test_says_which_optimizers_see_zeros_and_which_go_by_shape(self, name, mark):
        assert MARKS[mark][1](name) == (mark in RECORD.optimizers[name])

    def test_says_how_rows_of_a_matrix_are_treated(self):
        params = {"w": jax.random.normal(jax.random.key(0), (6, 4))}
        for k in (1, 3):
            tx = fz.freeze(optax.contrib.muon(1.0), {"w": ~fz.rows(slice(0, k))})
            rows = tx.update(params, tx.init(params), params)[0]["w"][:k]
            cosine = jnp.vdot(rows[0], params["w"][0]) / jnp.linalg.norm(rows[0]) / jnp.linalg.norm(params["w"][0])
            assert abs(cosine) > 0.99 or k > 1
            singular = np.linalg.svd(rows)[1]
            assert singular[0] < 2 * singular[-1]
            factors = optax.adafactor(min_dim_size_to_factor=3)
            state = fz.freeze(factors, {"w": ~fz.rows(slice(0, k))}).init(params)
            assert (optax.tree.get(state, "v_col")["w"].shape == (1,)) == (k == 1)
        tx = optax.contrib.muon(1.0, muon_weight_dimension_numbers={"w": optax.contrib.MuonDimensionNumbers()})
        fz.freeze(tx, {"w": fz.rows(0)}).init(params)
        vector = fz.freeze(tx, {"w": fz.elements(np.arange(24).reshape(6, 4) < 9, compact=True)})
        with pytest.raises(ValueError, match="rank >= 2"):
            vector.update(params, vector.init(params), params)


def test_the_documentation_has_the_required_versions():
    project = pathlib.Path("pyproject.toml").read_text()
    table = dict(re.findall(r"^\| (Python|JAX|Optax|Flax) \| ([\d.]+) \|", DOCUMENTATION, re.MULTILINE))
    required = {name: re.search(rf'"{name}>=([\d.]+)"', project)[1] for name in ("jax", "optax", "flax")}
    required["python"] = re.search(r'requires-python = ">=([\d.]+)"', project)[1]
    assert {name.lower(): version for name, version in table.items()} == required


class TestTheListing:
    def test_building_blocks_do_not_count(self):
        names = set(optimizers.found())
        assert {"adam", "lbfgs", "polyak_sgd", "contrib.muon", "contrib.dog", "contrib.mechanize", "lookahead"} <= names
        assert not names & {"scale_by_adam", "scale_by_learning_rate", "clip", "ema", "trace", "inject_hyperparams"}

    def test_a_new_optimizer_joins_by_itself(self, monkeypatch):
        def fresh(learning_rate: float, *, nesterov: bool = True) -> optax.GradientTransformation:
            return optax.sgd(learning_rate, momentum=0.5, nesterov=nesterov)

        monkeypatch.setattr(optax.contrib, "fresh", fresh, raising=False)
        assert optimizers.found()["contrib.fresh"].make().init({}) is not None
