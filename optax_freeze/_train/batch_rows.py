"""Finds in a batch the rows that train in this step, of leaves whose rows keep their state."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from optax_freeze._errors import described, is_array, is_int, refuse_no_mapping, type_error, value_error, with_article
from optax_freeze._optimizer.freeze import FreezeState
from optax_freeze._optimizer.kept_state import OF_SEVERAL_STEPS, refuse_optimizer
from optax_freeze._spec.row_numbers import rows_named
from optax_freeze._spec.selector_algebra import as_selector, first_match
from optax_freeze._spec.tree import Leaf, PyTree
from optax_freeze._state.own_states import states_in, with_rows


def refuse_no_functions(rows: Mapping[Any, Callable[..., Any]]) -> None:
    call = "fz.train_step(loss, tx, rows={pattern: fn})"
    fix = 'rows={"embed": lambda ids, targets: ids}'
    refuse_no_mapping("rows", rows, "{pattern: function of the batch}", at=call, fix=fix)
    for key, fn in rows.items():
        if not callable(fn):
            what, got = "`rows` takes functions of the batch", described(fn)
            raise type_error(what, at=str(key), got=got, expected="fn(*batch) -> integer ids", fix=fix)


def with_rows_of(state: PyTree, rows: Mapping[Any, Callable[..., Any]], *args: Any, **kwargs: Any) -> PyTree:
    """A state in which the rows train that functions find in a batch."""
    for around in states_in(state, OF_SEVERAL_STEPS):
        for inside in states_in(around, FreezeState):
            if inside.plan.kept:
                refuse_optimizer(inside.plan, inside.plan.kept[0], f"{with_article(type(around).__name__)} around it")
    leaves = [pair for node in states_in(state, FreezeState) for pair in node.plan.entries()]
    ids = [_ids(key, fn(*args, **kwargs)) for key, fn in rows.items()]
    kept: list[tuple[int | None, Leaf, Any]] = []
    if any(selection.keep_state for _, selection in leaves):
        matches = first_match([as_selector(key, "rows") for key in rows], [leaf for leaf, _ in leaves])
        kept = [(n, *pair) for n, pair in zip(matches, leaves, strict=True) if pair[1].keep_state]
    numbers = {}
    for n, leaf, selection in kept:
        if n is None:
            continue
        needed = min(ids[n].size, selection.size)
        if needed > selection.count:
            raise value_error(
                "a batch may name more rows than the spec has",
                at=leaf.path,
                got=f"up to {needed} rows in this batch, and {selection.count} in the spec",
                expected=f"at least {needed}: no row of a batch is left out",
                fix=f"~fz.rows(jnp.arange({needed}), keep_state=True)",
            )
        numbers[leaf.path] = rows_named(ids[n], selection.size, selection.count)
    found, paths = {n for n, *_ in kept}, [leaf.path for _, leaf, _ in kept]
    for n, key in enumerate(rows):
        if n not in found:
            raise value_error(
                "`rows` names no leaf whose rows keep their state",
                at=str(key),
                got=f"{key!r}",
                expected=f"a pattern of one of {paths}" if kept else "a spec with such rows",
                fix="put ~fz.rows(jnp.arange(k), keep_state=True) into the spec, or correct the pattern",
            )
    return with_rows(state, numbers)


def _ids(key: Any, ids: Any) -> jax.Array:
    if is_int(ids) or (is_array(ids) and jnp.issubdtype(ids.dtype, jnp.integer)):
        return jnp.asarray(ids)
    what = "the rows of a batch are not integers"
    fix = "return the ids that the loss looks up: lambda ids, targets: ids"
    raise type_error(what, at=str(key), got=described(ids), expected="one array of integer ids, of any shape", fix=fix)
