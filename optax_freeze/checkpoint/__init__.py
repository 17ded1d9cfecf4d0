"""Saves and restores checkpoints of the trainable parameters with Orbax, without the frozen base.

A checkpoint contains the trainable parameters, the optimizer state, a record of what was frozen, and fingerprints of
the frozen base and of each saved array. Restoring it with a different base or spec, or from damaged files, raises an
error. Orbax alone writes the whole tree, and restores it without comparing anything.
"""

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from optax_freeze._errors import described, is_array, message, type_error, value_error, whole_number
from optax_freeze._optimizer.group_plans import register_groups_with_flax
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import on_device
from optax_freeze._spec.resolve import Spec, Tied, make_plan, register_with_flax
from optax_freeze._spec.sharding import replicated
from optax_freeze._spec.tree import PyTree
from optax_freeze._state.state_shardings import Placed, beside
from optax_freeze._verify import saved_base
from optax_freeze._verify.one_writer import another_writer, only_writer
from optax_freeze._verify.processes import in_process_0, refuse_different_processes
from optax_freeze.checkpoint import _record

register_with_flax()
register_groups_with_flax()


class Saving:
    """A handle for a checkpoint that :func:`save` writes in the background.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from optax_freeze import checkpoint
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     saving = checkpoint.save(directory, {"w": jnp.ones(2)}, False, step=0, wait=False)
      ...     saving.wait()
      ...     checkpoint.latest_step(directory)
      0
    """

    def __init__(self, manager: ocp.CheckpointManager, held: contextlib.ExitStack):
        self._manager = manager
        self._held = held  # until it is done
        self._waiting = threading.Lock()
        self._done = False

    def __repr__(self) -> str:
        return f"Saving({str(self._manager.directory)!r}, {'done' if self._done else 'under way'})"

    def wait(self) -> None:
        """Waits until the checkpoint is complete, and raises any error that occurred while writing it."""
        with self._waiting:
            if not self._done:
                self._done = True
                with self._held:
                    self._manager.wait_until_finished()


_CALLS = "checkpoint.save(directory, params, frozen, step=...), checkpoint.restore(directory, params)"
_UNFINISHED: dict[str, Saving] = {}
"""The last checkpoint of each directory that :func:`save` did not wait for."""
_SAVING = threading.Lock()
"""Threads save one after another, since Orbax numbers the operations of a process without locks."""


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
    """Saves the trainable parameters and the optimizer state as one checkpoint.

    The checkpoint is a directory named by the step, and is written atomically: a process that dies while writing leaves
    earlier checkpoints intact. With several processes, all of them must call this function.

    Args:
      directory: the directory for the checkpoints of a run, created if necessary; any path that Orbax accepts.
      params: the full parameters. Frozen parameters are not written.
      frozen: the spec of the frozen parameters, in any form.
      step: the number of the checkpoint, greater than all earlier ones.
      opt_state: the optimizer state, or None.
      wait: if True, return when the checkpoint is complete. If False, return when the arrays have been copied from the
        devices, so that you may donate them, and write in the background.
      tied: as in :func:`optax_freeze.partition`.

    Returns:
      A :class:`Saving`, whose ``wait()`` returns when the checkpoint is complete.

    Raises:
      ValueError: if the spec does not fit, or freezes everything; if ``step`` is not greater than the latest; if
        ``directory`` contains ``*``, ``?`` or ``[``, or another process is saving there; if processes of one job have
        different specs or frozen bits.
      TypeError: if ``step`` is not an int, or arrays are traced.

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
    where = saved_base.absolute(directory, _CALLS)
    if any(character in where for character in "*?["):  # Orbax globs its own files, and would leave arrays out
        got, expected, fix = "a path with wildcards", "a path without any of * ? [", "choose another name"
        raise value_error("Orbax cannot save into this directory", at=where, got=got, expected=expected, fix=fix)
    _refuse_no_state(opt_state)
    plan = make_plan(params, frozen, tied=tied).in_state
    values = _tree.flatten(params)[0]
    expected = "every full leaf, since the checkpoint stores the fingerprint of the base"
    fix = "fz.combine(trainable, rest)"
    _tree.refuse_half_a_tree(params, "a checkpoint needs the full parameters", expected, fix)
    plan.refuse_all_frozen("there is nothing to save", frozen)
    leaves = functools.partial(saved_base.leaf_records, params, plan)
    refuse_different_processes("the spec", lambda: [leaf.as_json() for leaf in leaves(fingerprints=False)])
    state = None if opt_state is None else _record.state_records(opt_state)
    record = _record.Record(leaves(), state, _record.digests_of(opt_state), {})
    refuse_different_processes("the frozen bits", record.as_json)
    nodes = {"trainable": plan.take(values), "masks": plan.masks, "opt_state": _record.flatten_state(opt_state)[0]}
    written = {item: {n: array for n, array in _arrays(flat).items() if np.size(array)} for item, flat in nodes.items()}
    items: dict[str, Any] = {item: ocp.args.StandardSave(arrays) for item, arrays in written.items() if arrays}
    record = dataclasses.replace(record, written={item: _record.array_records(x) for item, x in written.items()})
    items["spec"] = ocp.args.JsonSave(record.as_json())
    with _SAVING, contextlib.ExitStack() as held:
        _wait_for(where)
        if "://" not in where:
            in_process_0(lambda: held.enter_context(only_writer(where)), otherwise=lambda: another_writer(where))
        manager = _manager(where, create=True)
        held.callback(manager.close)
        _refuse_old_step(step, manager)
        manager.save(step, args=ocp.args.Composite(**items), force=True)
        saving = Saving(manager, held.pop_all())
        if wait:
            saving.wait()
        else:
            _UNFINISHED[where] = saving
    return saving


def restore(
    directory: str | os.PathLike[str],
    params: PyTree,
    *,
    step: int | None = None,
    opt_state: PyTree | None = None,
    frozen: Spec | None = None,
) -> tuple[PyTree, PyTree | None]:
    """Restores a checkpoint onto the parameters that the training started from.

    Args:
      directory: the directory given to :func:`save`.
      params: the full parameters of the base. Their frozen bits must be those of the saved run, which is checked. The
        trainable parameters are replaced; they provide shapes, dtypes and shardings, on any mesh. Leaves in host memory
        stay there.
      step: the number of the checkpoint, or None for the latest.
      opt_state: a template of the optimizer state, ``tx.init(params)`` or its shapes, with shardings if these are to
        be other than on the device of the parameters; or None.
      frozen: a spec to compare with the spec of the checkpoint, or None. Without it, a
        :class:`~optax_freeze.FreezeWarning` names the masks and dynamic rows in ``opt_state`` that differ from those of
        the checkpoint, which are restored.

    Returns:
      ``(params, opt_state)``: the full parameters, and the optimizer state or None.

    Raises:
      FileNotFoundError: if there is no checkpoint, or no checkpoint of this step.
      ValueError: if the base has other leaves, shapes, dtypes or frozen bits; if ``frozen`` differs from the saved
        spec; if ``opt_state`` is the state of a different optimizer or spec, or no state was saved; if the checkpoint
        is damaged (the message names the array, or the field of its record) or was written by a newer release; if
        ``step`` is negative.
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
      ValueError: the base differs from the base of the checkpoint
        at: encoder
      ...
    """
    step = None if step is None else _step_number(step)
    where = saved_base.absolute(directory, _CALLS)
    _refuse_no_state(opt_state)
    _wait_for(where)
    if not _exists(where):
        raise _nothing_there(where, "no such directory", [], step)
    with _manager(where) as manager:
        steps = sorted(manager.all_steps())
        chosen = step if step is not None else manager.latest_step()
        if chosen is None or chosen not in steps:
            raise _nothing_there(where, "no checkpoint", steps, step)
        at = os.path.join(where, str(chosen))
        record = _record.read_record(at)
        values, treedef = _tree.flatten(params)
        fix = "give the full parameters of the model that was saved"
        now = saved_base.leaf_records(params, make_plan(params, False), fingerprints=False)
        saved_base.refuse_other_arrays(record.leaves, now, "params", "the checkpoint", fix)
        paths = [leaf.path for leaf in record.leaves]
        committed = (leaf.sharding for leaf in jax.tree.leaves(values) if _is_committed(leaf))
        default = next((replicated(on_device(sharding)) for sharding in committed), None)
        read = functools.partial(_read, manager, at, record.written, default)
        saved_masks = read("masks", paths, list(map(_record.mask_struct, record.leaves)), values)
        plan = make_plan(params, _record.spec_of(record.leaves, saved_masks))
        if frozen is not None:
            fix = "restore with the spec that was saved, or None; then fz.migrate(opt_state, tx, params)"
            given = make_plan(params, frozen).in_state.selections
            saved_base.refuse_other_selections(plan.selections, given, paths, "the checkpoint", fix)
        expected = "the frozen bits that the parameters had in checkpoint.save"
        fix = (
            "load the base that was there; frozen leaves that were changed on purpose (LoRA was merged) are not in a"
            " checkpoint unless checkpoint.save(directory, params, False, step=...); if the optimizer did, see fz.audit"
        )
        now = saved_base.leaf_records(params, plan)
        saved_base.refuse_other_base(record.leaves, now, "the checkpoint", expected, fix)
        if opt_state is not None:
            _record.refuse_other_state(record, opt_state, at)
        parts = read("trainable", paths, jax.eval_shape(lambda: plan.take(values)), values)
        nodes, structure = _record.flatten_state(opt_state)
        state = jax.tree.unflatten(structure, read("opt_state", _record.paths_of_state(opt_state), nodes, nodes))
    if frozen is None:
        _record.warn_of_other_masks(opt_state, state)
    new = [selection.put(value, part) for selection, value, part in zip(plan.selections, values, parts, strict=True)]
    return jax.tree.unflatten(treedef, new), state


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Returns the step of the latest complete checkpoint. With several processes, all of them call it.

    Args:
      directory: the directory given to :func:`save`.

    Returns:
      The step, or None if there is no complete checkpoint.

    Example:
      >>> import tempfile
      >>> from optax_freeze import checkpoint
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     print(checkpoint.latest_step(directory))
      None
    """
    where = saved_base.absolute(directory, _CALLS)
    if not _exists(where):
        return None
    with _manager(where) as manager:
        return manager.latest_step()


def _step_number(step: Any) -> int:
    fix = "step=int(step)" if hasattr(step, "dtype") else "step=0"
    return whole_number("step", step, fix=fix)


def _refuse_no_state(opt_state: PyTree) -> None:
    if isinstance(opt_state, (optax.GradientTransformation, optax.MultiSteps)):
        got, fix = described(opt_state), "opt_state=tx.init(params) to restore, and the result of tx.update to save"
        raise type_error("not an optimizer state", at="opt_state", got=got, expected="an optimizer state", fix=fix)


def _refuse_old_step(step: int, manager: ocp.CheckpointManager) -> None:
    latest = manager.latest_step()
    if latest is not None and step <= latest:
        is_there = step in manager.all_steps()
        which = "a checkpoint of this step" if is_there else "a later checkpoint"
        at, expected = str(manager.directory / str(step if is_there else latest)), f"a step after {latest}, the latest"
        fix = "continue from the latest step, or save into another directory"
        raise value_error(f"{which} already exists", at=at, got=f"step={step}", expected=expected, fix=fix)


def _exists(where: str) -> bool:
    return "://" in where or os.path.isdir(where)


def _manager(where: str, *, create: bool = False) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(where, options=ocp.CheckpointManagerOptions(create=create))


def _wait_for(where: str) -> None:
    if saving := _UNFINISHED.pop(where, None):
        saving.wait()


def _arrays(nodes: Sequence[Any]) -> dict[str, Any]:
    """The array of each node that has one, by the number of the node, with random keys as their data."""
    arrays = {str(i): array for i, node in enumerate(nodes) for array in jax.tree.leaves(node)}
    arrays = {name: array if is_array(array) else jnp.asarray(array) for name, array in arrays.items()}
    return {name: jax.random.key_data(array) if saved_base.is_key(array) else array for name, array in arrays.items()}


def _read(
    manager: ocp.CheckpointManager,
    at: str,
    written: _record.Written,
    default: jax.sharding.Sharding | None,
    item: str,
    paths: Sequence[str],
    nodes: Sequence[Any],
    near: Sequence[Any],
) -> list[Any]:
    """``nodes`` with the arrays of one item of the checkpoint ``at``, each placed like the array in ``near``.

    Where that is not on a device they have the ``default`` sharding. Without one they are not committed to a device: a
    step would compile again, since arguments that are committed to a device make all of its results so.
    They are read in the dtype in which they were written, and compared with what was written. Empty arrays are not
    written, since Orbax refuses them; they are created here.
    """
    arrays, targets = {}, {}
    for name, struct in jax.eval_shape(_arrays, nodes).items():
        [other] = jax.tree.leaves(near[int(name)])
        sharding = None if isinstance(other, jax.Array) else default
        if _is_committed(other):
            place = on_device(other.sharding)
            sharding = beside(struct, Placed(other.shape, place), replicated(place))
        if not struct.size:
            arrays[name] = jnp.zeros(struct.shape, struct.dtype, device=sharding)
        elif name not in written.get(item, ()):
            raise _record.damaged(at, f"written.{item}.{name}", "nothing", "a dtype and a fingerprint")
        else:
            targets[name] = jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
    if targets:
        as_written = {name: _record.target(struct, written[item][name]) for name, struct in targets.items()}
        restore = ocp.args.Composite(**{item: ocp.args.StandardRestore(as_written)})
        with _record.reading(at, item):
            found = manager.restore(int(os.path.basename(at)), args=restore)[item]
        _record.refuse_other_bits(written[item], found, paths, at)
        for name, struct in targets.items():
            array = found[name] if found[name].dtype == struct.dtype else found[name].astype(struct.dtype)
            arrays[name] = jnp.array(array) if struct.sharding is None else jax.device_put(array, struct.sharding)
    return [_with_array(node, arrays[str(i)]) if str(i) in arrays else node for i, node in enumerate(nodes)]


def _is_committed(array: Any) -> bool:
    return getattr(array, "sharding", None) is not None and getattr(array, "committed", True)


def _with_array(node: Any, array: Any) -> Any:
    [old], structure = jax.tree.flatten(node)
    array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(old)) if saved_base.is_key(old) else array
    return jax.tree.unflatten(structure, [array])


def _nothing_there(where: str, got: str, steps: Sequence[int], step: int | None) -> FileNotFoundError:
    expected = "a complete checkpoint" if step is None else f"a checkpoint of step {step}"
    fix = "pass the directory that was given to checkpoint.save; if it is empty, latest_step returns None"
    if steps:
        got, fix = f"steps {', '.join(map(str, steps))}", f"step={max(steps)}, or None for the latest"
    return FileNotFoundError(message("no checkpoint to restore", at=where, got=got, expected=expected, fix=fix))
