"""Sets of rows: their operations are those of sets of numbers, and equal sets are equal objects."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_freeze._spec.row_set import RowSet


def rows(bools):
    return RowSet.of_numbers(len(bools), np.flatnonzero(bools).tolist())


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80))
def test_any_two_sets(pairs):
    a, b = np.array(pairs).T
    for found, expected in ((~rows(a), ~a), (rows(a) | rows(b), a | b), (rows(a) & rows(b), a & b)):
        assert found == rows(expected) == RowSet.of_runs(found.size, found.runs)
        assert found.numbers.tolist() == np.flatnonzero(expected).tolist()
        assert found.count == expected.sum()
        assert found.run is None or found.numbers.tolist() == list(range(*found.run))


@pytest.mark.parametrize("size", [100, 10**6])
def test_many_runs_that_are_a_progression_take_no_room(size):
    even = RowSet.of_numbers(size, range(0, size, 2))
    assert (even.progressions, even.others, str(even)) == (((0, size - 1, 2),), False, f"0:{size - 1}:2")
    assert (~even).progressions == ((1, size, 2),)
    thirds = ~RowSet.of_numbers(size, range(0, size, 3))
    assert (thirds.others, thirds.count) == (True, size - len(range(0, size, 3)))
    assert (~thirds).numbers.tolist() == list(range(0, size, 3))
