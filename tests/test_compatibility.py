"""Every optimizer of the installed Optax under some form of freezing: a sample of the matrix.

``make compatibility`` runs every cell of it.
"""

import itertools

import optax
import optimizers
import pytest
from matrix import DTYPES, MODES, OPTIMIZERS, SPECS, Cell, pairwise_cells, run

FACTORS = dict(zip(Cell._fields, (OPTIMIZERS, SPECS, DTYPES, MODES), strict=True))
SAMPLE = list({cell.optimizer: cell for cell in pairwise_cells()}.values())


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_an_optimizer_steps_as_on_what_trains_alone(cell):
    error = run(cell)
    if error:
        pytest.skip(f"Optax fails by itself: {error}")


def test_the_sample_has_every_optimizer_and_the_cover_every_pair():
    assert {cell.optimizer for cell in SAMPLE} == set(OPTIMIZERS)
    cells = list(pairwise_cells())
    for a, b in itertools.combinations(Cell._fields, 2):
        pairs = {(getattr(cell, a), getattr(cell, b)) for cell in cells}
        assert pairs == set(itertools.product(FACTORS[a], FACTORS[b])), (a, b)


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
