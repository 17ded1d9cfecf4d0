"""Checkpoints of what trains, by Orbax: the frozen base is never written, and never silently another one.

Orbax alone writes the whole tree, or, of a tree with holes, whatever it is given, and puts it onto any base. Here a
checkpoint holds what trains and the optimizer's state, and beside them what was frozen, leaf by leaf, with a
fingerprint of it: they go back onto the same base under the same spec, or there is an error.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from optax_freeze._errors import described, message, type_error, value_error, whole_number
from optax_freeze._optimizer.freeze_when import GroupPlans
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.resolve import Spec, Tied, make_plan, register_with_flax
from optax_freeze._spec.tree import Part, PyTree, Rest
from optax_freeze._state.shardings import Placed, beside
from optax_freeze._verify.fingerprint import digests
from optax_freeze.checkpoint._record import (
    FORMAT,
    bare,
    is_dense,
    leaf_record,
    read_record,
    reading,
    refuse_other_base,
    refuse_other_leaves,
    refuse_other_spec,
    refuse_other_state,
    spec_of_record,
    state_record,
)

register_with_flax()
register_with_flax(GroupPlans)


class Saving:
    """A checkpoint on its way to the disk, from :func:`save`.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from optax_freeze import checkpoint
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     saving = checkpoint.save(directory, {"w": jnp.ones(2)}, False, step=0, wait=False)
      ...     saving.wait()
      ...     checkpoint.latest_step(directory)
      0
    """

    def __init__(self, manager: ocp.CheckpointManager):
        self._manager = manager
        self._done = False

    def __repr__(self) -> str:
        return f"Saving({str(self._manager.directory)!r}, {'done' if self._done else 'under way'})"

    def wait(self) -> None:
        """Returns after the commit; raises what went wrong on the way."""
        if not self._done:
            try:
                self._manager.wait_until_finished()
            finally:
                self._done = True
                self._manager.close()


_UNDER_WAY: dict[str, Saving] = {}
"""For each directory the last checkpoint that was not waited for."""


def save(
    directory: str | os.PathLike[str],
    params: PyTree,
    frozen: Spec,
    *,
    step: int,
    opt_state: PyTree | None = None,
    wait: bool = True,
    tied: Tied = "error",
) -> Saving:
    """Writes what trains, and the optimizer's state, as one checkpoint.

    It stands in a directory of its own, named by the step, which appears only when all of it is written: a process that
    dies leaves the checkpoints before as they were. In a program of several processes all of them call this.

    Args:
      directory: where the checkpoints of a run are; made if it is not there. Anything that Orbax takes.
      params: the full parameters, of which nothing frozen is written.
      frozen: what is frozen, in any form.
      step: the number of the checkpoint, greater than those before.
      opt_state: the optimizer's state; None writes none.
      wait: True returns after the commit. False returns when the arrays are copied off the devices, so that they may be
        donated, and writes in the background.
      tied: ``"error"`` refuses one array object at two paths of which only one is frozen.

    Returns:
      A handle whose ``wait()`` returns after the commit.

    Raises:
      ValueError: if the spec does not fit, or nothing trains; if the step is there already, or an earlier one than the
        latest; if processes have different specs or frozen bits.
      TypeError: if ``step`` is no int, or arrays are traced.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax, optax_freeze as fz
      >>> from optax_freeze import checkpoint
      >>> params = {"encoder": jnp.ones(1000), "head": jnp.ones(2)}
      >>> tx = fz.freeze(optax.adam(0.1), "encoder")
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     _ = checkpoint.save(directory, params, "encoder", step=100, opt_state=tx.init(params))
      ...     base = {**params, "head": jnp.zeros(2)}
      ...     restored, state = checkpoint.restore(directory, base, opt_state=tx.init(base))
      >>> restored["head"]
      Array([1., 1.], dtype=float32)
    """
    step = _step_number(step)
    where = _absolute(directory)
    _refuse_no_state(opt_state)
    plan = make_plan(params, frozen, tied=tied)
    values = _tree.flatten(params)[0]
    _refuse_half_a_tree(values, params)
    plan.refuse_all_frozen("there is nothing to save", frozen)
    record = {
        "format": FORMAT,
        "leaves": [leaf_record(*leaf) for leaf in zip(plan.leaves, plan.selections, strict=True)],
        "opt_state": None if opt_state is None else state_record(opt_state),
    }
    _refuse_different_processes("what is frozen", _hashed(record["leaves"]))
    record["frozen"] = {path: np.asarray(digest).tolist() for path, digest in digests(params, plan).items()}
    _refuse_different_processes("the frozen bits", _hashed(record["frozen"]))
    nodes = {"trainable": plan.take(values), "masks": plan.masks, "opt_state": _tree.flatten(opt_state)[0]}
    arrays = {name: _arrays(flat) for name, flat in nodes.items()}
    items: dict[str, Any] = {name: ocp.args.StandardSave(item) for name, item in arrays.items() if item}
    items["spec"] = ocp.args.JsonSave(record)
    _finish(where)
    manager = ocp.CheckpointManager(where, options=ocp.CheckpointManagerOptions(create=True))
    try:
        latest = manager.latest_step()
        if latest is not None and step <= latest:
            raise value_error(
                "a checkpoint of this step is there already"
                if step in manager.all_steps()
                else "a later checkpoint is there already",
                at=where,
                got=f"step={step}",
                expected=f"a step after {latest}, the latest",
                fix="go on from the latest step, or save into another directory",
            )
        manager.save(int(step), args=ocp.args.Composite(**items), force=True)
    except BaseException:
        manager.close()
        raise
    saving = Saving(manager)
    if wait:
        saving.wait()
    else:
        _UNDER_WAY[where] = saving
    return saving


def restore(
    directory: str | os.PathLike[str],
    params: PyTree,
    *,
    step: int | None = None,
    opt_state: PyTree | None = None,
    frozen: Spec | None = None,
) -> tuple[PyTree, PyTree | None]:
    """Puts a checkpoint onto the parameters that it was trained from.

    Args:
      directory: as in :func:`save`.
      params: the base, whose frozen part is that of the run: the same bits, which is checked. What trains in it gives
        shapes, dtypes and shardings, on whatever mesh, and is replaced.
      step: which checkpoint; None is the latest.
      opt_state: a template of the optimizer's state, ``tx.init(params)`` or its shapes with shardings; None restores
        none.
      frozen: what is frozen, if it is to be checked; the checkpoint knows it.

    Returns:
      ``(params, opt_state)``: the parameters in full, and the state or None.

    Raises:
      FileNotFoundError: if there is no checkpoint, or not of this step.
      ValueError: if the base has other leaves, shapes, dtypes or frozen bits; if ``frozen`` is another spec, or
        ``opt_state`` the state of another optimizer or spec, or none was saved; if the checkpoint is damaged (a field
        of its record that is missing or wrong is named), or of a newer release; if ``step`` is negative.
      TypeError: if ``step`` is not an int, or ``opt_state`` is an optimizer.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from optax_freeze import checkpoint
      >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     _ = checkpoint.save(directory, params, "encoder", step=0)
      ...     checkpoint.restore(directory, {**params, "encoder": jnp.zeros(2)})
      Traceback (most recent call last):
          ...
      ValueError: another base: its frozen bits differ from those of the checkpoint
        at: encoder
      ...
    """
    if step is not None:
        step = _step_number(step)
    where = _absolute(directory)
    _refuse_no_state(opt_state)
    _finish(where)
    if not _exists(where):
        raise _nothing_there(where, "no such directory")
    with _reading(where) as manager:
        steps = sorted(manager.all_steps())
        chosen = step if step is not None else manager.latest_step()
        if chosen is None or chosen not in steps:
            raise _nothing_there(where, f"steps {steps}" if steps else "no checkpoint", step)
        at = os.path.join(where, str(chosen))
        record = read_record(at)
        values, treedef = _tree.flatten(params)
        refuse_other_leaves(record["leaves"], params)
        dense = [value if is_dense(leaf) else _tree.HOLE for leaf, value in zip(record["leaves"], values, strict=True)]
        arrays = _read_arrays(manager, at, chosen, "masks", [_mask_like(value) for value in dense], dense)
        plan = make_plan(params, spec_of_record(record["leaves"], _put_back(dense, arrays)))
        if frozen is not None:
            refuse_other_spec(plan, make_plan(params, frozen))
        refuse_other_base(record["frozen"], digests(params, plan))
        if opt_state is not None:
            refuse_other_state(record["opt_state"], opt_state, at)
        like = jax.eval_shape(lambda: plan.take(values))
        trainable = _read_arrays(manager, at, chosen, "trainable", like, values)
        state = None
        if opt_state is not None:
            nodes, structure = _tree.flatten(opt_state)
            read = _read_arrays(manager, at, chosen, "opt_state", nodes, nodes)
            state = jax.tree.unflatten(structure, _put_back(nodes, read))
    parts = _put_back(like, trainable)
    new = [selection.put(value, part) for selection, value, part in zip(plan.selections, values, parts, strict=True)]
    return jax.tree.unflatten(treedef, new), state


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """The number of the last checkpoint that is complete.

    Args:
      directory: as in :func:`save`.

    Returns:
      The step, or None where nothing is committed.

    Example:
      >>> import tempfile
      >>> from optax_freeze import checkpoint
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     print(checkpoint.latest_step(directory))
      None
    """
    where = _absolute(directory)
    if not _exists(where):
        return None
    with _reading(where) as manager:
        return manager.latest_step()


def _absolute(directory: str | os.PathLike[str]) -> str:
    if not isinstance(directory, (str, os.PathLike)):
        raise type_error(
            "no directory",
            at="the first argument",
            got=described(directory),
            expected="the path of a directory, then the parameters",
            fix="checkpoint.save(directory, params, frozen, step=...), checkpoint.restore(directory, params)",
        )
    where = os.fspath(directory)
    if "://" in where:
        return where
    if os.path.isfile(where):
        raise value_error(
            "no directory",
            at=where,
            got="a file",
            expected="a directory of checkpoints, or nothing there",
            fix="name the directory: each checkpoint becomes a directory in it",
        )
    return os.path.abspath(where)


def _step_number(step: Any) -> int:
    fix = "step=int(step)" if hasattr(step, "dtype") else "step=0"
    return whole_number("the number of a step", step, at="step", fix=fix)


def _refuse_no_state(opt_state: PyTree) -> None:
    if isinstance(opt_state, (optax.GradientTransformation, optax.MultiSteps)):
        raise type_error(
            "no optimizer state",
            at="opt_state",
            got=described(opt_state),
            expected="the state",
            fix="opt_state=tx.init(params) to restore, and what tx.update gave to save",
        )


def _refuse_half_a_tree(values: Sequence[Any], params: PyTree) -> None:
    for path, value in zip(_tree.paths(params), values, strict=True):
        if _tree.is_hole(value) or isinstance(value, (Part, Rest)):
            raise value_error(
                "a checkpoint is taken of the full parameters",
                at=path,
                got="a hole" if _tree.is_hole(value) else "part of a leaf",
                expected="every leaf whole: the checkpoint says on which base it goes",
                fix="fz.combine(trainable, rest)",
            )


def _exists(where: str) -> bool:
    return "://" in where or os.path.isdir(where)


def _reading(where: str) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(where, options=ocp.CheckpointManagerOptions(create=False))


def _finish(where: str) -> None:
    """Waits for what is still being written there."""
    saving = _UNDER_WAY.pop(where, None)
    if saving is not None:
        saving.wait()


def _read_arrays(
    manager: ocp.CheckpointManager, at: str, step: int, item: str, nodes: Sequence[Any], like: Sequence[Any]
) -> dict[str, Any]:
    """The arrays of one item by their numbers; empty ones, which are not written, are made where they belong."""
    template = _template(nodes, like)
    written = {name: struct for name, struct in template.items() if struct.size}
    read = {}
    if written:
        with reading(at, item):
            read = manager.restore(step, args=ocp.args.Composite(**{item: ocp.args.StandardRestore(written)}))[item]
    empty = {name: struct for name, struct in template.items() if not struct.size}
    return {**read, **{name: jnp.zeros(x.shape, x.dtype, device=x.sharding) for name, x in empty.items()}}


def _arrays(nodes: Sequence[Any]) -> dict[str, Any]:
    """The arrays of a flat tree by their numbers; random keys as their words. Orbax refuses empty ones."""
    arrays = {str(i): bare(node) for i, node in enumerate(nodes) if not _tree.is_hole(bare(node))}
    return {name: jax.random.key_data(x) if _is_key(x) else x for name, x in arrays.items() if np.size(x)}


def _template(nodes: Sequence[Any], like: Sequence[Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes to restore, each where the array beside it lies."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    template = {}
    for i, (node, near) in enumerate(zip(nodes, like, strict=True)):
        array, near = bare(node), bare(near)
        if not _tree.is_hole(array):
            sharding = getattr(near, "sharding", None) or here
            array = jax.eval_shape(jax.random.key_data, array) if _is_key(array) else array
            place = beside(array, Placed(np.shape(near), sharding), sharding)
            template[str(i)] = jax.ShapeDtypeStruct(np.shape(array), jnp.result_type(array), sharding=place)
    return template


def _put_back(nodes: Sequence[Any], arrays: Mapping[str, Any]) -> list[Any]:
    """A flat tree with these arrays in it."""
    filled = []
    for i, node in enumerate(nodes):
        array = arrays.get(str(i), node)
        if _is_key(bare(node)) and str(i) in arrays:
            array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(bare(node)))
        if isinstance(node, Part) and str(i) in arrays:
            array = jax.tree.unflatten(jax.tree.structure(node), [array])
        filled.append(array)
    return filled


def _is_key(array: Any) -> bool:
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _mask_like(value: Any) -> Any:
    return value if _tree.is_hole(value) else jax.ShapeDtypeStruct(np.shape(value), bool)


def _hashed(record: Any) -> np.ndarray:
    text = json.dumps(record, sort_keys=True).encode()
    return np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), np.uint32)


def _refuse_different_processes(what: str, digest: np.ndarray) -> None:
    if jax.process_count() == 1:
        return
    digests = np.asarray(multihost_utils.process_allgather(digest))
    for process, other in enumerate(digests):
        if not np.array_equal(other, digests[0]):
            raise value_error(
                f"processes differ in {what}",
                at=f"process {process}",
                got=f"the fingerprint {other.tobytes().hex()}",
                expected=f"{digests[0].tobytes().hex()}, that of process 0",
                fix="run the same program with the same spec and parameters in every process",
            )


def _nothing_there(where: str, got: str, step: int | None = None) -> FileNotFoundError:
    text = message(
        "no checkpoint to restore",
        at=where,
        got=got,
        expected="a committed checkpoint" if step is None else f"that of step {step}",
        fix="give the directory that was given to checkpoint.save; where it is empty, latest_step is None",
    )
    return FileNotFoundError(text)
