"""Patches: only what was trained, in one ``.safetensors`` file that other programs can read, and back onto the base.

A checkpoint (:mod:`optax_freeze.checkpoint`) resumes a run; a patch is what leaves it. Both record the frozen base.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from optax_freeze._errors import described, refuse_no_mapping, type_error, value_error
from optax_freeze._report.safetensors_format import imported
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.rename import renamed
from optax_freeze._spec.resolve import Spec, Tied, make_plan
from optax_freeze._spec.selection import FROZEN
from optax_freeze._spec.tree import PyTree
from optax_freeze._verify import saved_base
from optax_freeze._verify.frozen_leaves import refuse_unreadable
from optax_freeze._verify.processes import in_process_0, refuse_different_processes
from optax_freeze.patch import _file
from optax_freeze.patch._base import put_patch, refuse_misfits, refuse_missing, refuse_other_base, refuse_overlap
from optax_freeze.patch._layout import taken
from optax_freeze.patch._patch import Patch as Patch

_Tree = TypeVar("_Tree")
_CALL = 'patch.save("tuned.safetensors", params, frozen)'


def take(params: PyTree, frozen: Spec, *, rename: Mapping[str, str] | None = None, tied: Tied = "error") -> Patch:
    """Takes what trains out of the parameters, without a file: to send it to processes that serve the model.

    With several processes, all of them must call this function.

    Args:
      params: the full parameters, of JAX or NumPy arrays.
      frozen: the spec of the frozen parameters, in any form. Of dense masks and dynamic rows in an optimizer state,
        ``fz.spec_of(state)``.
      rename: ``{path in params: name in the file}`` for other names, of leaves or of everything below a path; the
        longest name applies. Without it the name of a leaf is its path, with ``.`` for ``/``.
      tied: as in :func:`optax_freeze.partition`.

    Returns:
      A :class:`Patch`, of copies: the arrays of ``params`` may be donated afterwards.

    Raises:
      ValueError: if the spec does not fit, or freezes everything; if two tensors have one name, or a path of ``rename``
        is of no leaf; if the parameters are not full, or an array was donated; if processes differ in the spec.
      TypeError: if arrays have no values, or are traced.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> from optax_freeze import patch
      >>> base = {"embed": jnp.ones((1002, 4)), "head": jnp.ones(2)}
      >>> frozen = {"embed": fz.rows(slice(0, 1000)), "head": True}
      >>> found = patch.take({**base, "embed": base["embed"].at[1000:].set(2.0)}, frozen)
      >>> found.tensors["embed.rows"], found.tensors["embed.values"].shape
      (array([1000, 1001], dtype=int32), (2, 4))
      >>> patch.apply(base, found)["embed"][-3:, 0]
      Array([1., 2., 2.], dtype=float32)
    """
    _refuse_half_a_tree(params)
    plan = make_plan(params, frozen, tied=tied).in_state
    plan.refuse_all_frozen("there is nothing to take", frozen)
    values = _tree.flatten(params)[0]
    for leaf, selection, value in plan.entries(values):
        for array in (value, *jax.tree.leaves(selection)):
            refuse_unreadable(array, leaf.path, "params")
    leaves = saved_base.leaf_records(params, plan, fingerprints=False)
    refuse_different_processes("the spec", lambda: [leaf.as_json() for leaf in leaves])
    leaves = saved_base.leaf_records(params, plan)
    paths = [leaf.path for leaf in leaves]
    names = dict(zip(paths, renamed(paths, rename, of="params"), strict=True))
    tensors: dict[str, np.ndarray] = {}
    owners = {name: path for path, name in names.items()}
    for i, (leaf, selection, value) in enumerate(zip(leaves, plan.selections, values, strict=True)):
        recorded, arrays = taken(selection, value)
        leaves[i] = dataclasses.replace(leaf, selection=recorded)
        for ending, array in arrays.items():
            name = names[leaf.path] + ending
            if name in tensors or owners.get(name, leaf.path) != leaf.path or name == "__metadata__":
                raise _one_name(name, leaf.path, owners.get(name))
            tensors[name] = array
            owners[name] = leaf.path
    own = {leaf.path: names[leaf.path] for leaf in leaves if leaf.selection is not FROZEN}
    return Patch(tensors, {}, tuple(leaves), own)


def save(
    path: str | os.PathLike[str],
    params: PyTree,
    frozen: Spec,
    *,
    rename: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    tied: Tied = "error",
) -> Patch:
    """Saves what trains in one file of `safetensors <https://huggingface.co/docs/safetensors>`_, which others can read.

    The file is complete or does not exist; one that exists is replaced. With several processes, all of them must call
    this function; process 0 writes the file.

    Args:
      path: a local file; its directory is created if necessary.
      params: the full parameters. Frozen parameters are not written, but their fingerprints are.
      frozen: as in :func:`take`.
      rename: as in :func:`take`.
      metadata: strings by name, for the metadata of the file; they may be changed later.
      tied: as in :func:`take`.

    Returns:
      What was written, as a :class:`Patch`.

    Raises:
      ValueError: as in :func:`take`; if safetensors does not have a dtype, or ``path`` is a directory.
      TypeError: if arrays are traced, or ``path`` or ``metadata`` have another type.
      ImportError: if safetensors is not installed (``pip install safetensors``).

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from optax_freeze import patch
      >>> params = {"encoder": jnp.ones(1000), "head": {"kernel": jnp.ones(2)}}
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     file = f"{directory}/tuned.safetensors"
      ...     written = patch.save(file, params, "encoder", metadata={"task": "digits"})
      ...     found = patch.load(f"{directory}/tuned.safetensors")
      >>> found.tensors, found.metadata
      ({'head.kernel': array([1., 1.], dtype=float32)}, {'task': 'digits'})
    """
    where = _file_name(path)
    if os.path.isdir(where):
        expected, fix = "the name of a file", f'patch.save("{os.path.join(where, "tuned.safetensors")}", ...)'
        raise value_error("a directory, not a file", at=where, got="a directory", expected=expected, fix=fix)
    _refuse_other_metadata(metadata)
    imported(where)
    found = dataclasses.replace(take(params, frozen, rename=rename, tied=tied), metadata=dict(metadata or {}))
    _file.refuse_unwritable(found.tensors)
    record = _file.record_of(found._leaves, found._names, found.tensors)
    refuse_different_processes("the parameters", lambda: record)
    in_process_0(
        lambda: _file.write(where, record, found.tensors, found.metadata),
        otherwise=lambda: OSError(f"process 0 could not write {where}"),
    )
    return found


def load(path: str | os.PathLike[str]) -> Patch:
    """Reads a file that :func:`save` wrote, and compares all of it with its digests.

    Args:
      path: the file.

    Returns:
      A :class:`Patch`.

    Raises:
      ValueError: if the file is damaged, was not written by :func:`save`, or was written by a newer release.
      FileNotFoundError: if it does not exist.
      ImportError: if safetensors is not installed (``pip install safetensors``).

    Example:
      >>> import pathlib, tempfile, jax.numpy as jnp
      >>> from optax_freeze import patch
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     file = pathlib.Path(directory, "tuned.safetensors")
      ...     _ = patch.save(file, {"encoder": jnp.ones(1000), "head": jnp.ones(2)}, "encoder")
      ...     _ = file.write_bytes(file.read_bytes()[:-1] + b"!")
      ...     patch.load(file)
      Traceback (most recent call last):
          ...
      ValueError: the patch is damaged
        at: ...tuned.safetensors: head
      ...
    """
    leaves, names, tensors, metadata = _file.read(_file_name(path))
    return Patch(tensors, metadata, tuple(leaves), names)


def apply(params: _Tree, *patches: Patch, base: bool = True) -> _Tree:
    """Puts the values of patches into the parameters of their base.

    All patches are compared with ``params`` before anything is changed, so patches that were learned apart are applied
    together, in one call.

    Args:
      params: the full parameters of the base, in any containers; leaves that a patch does not know keep their values.
      *patches: patches of :func:`load` or :func:`take`.
      base: whether ``params`` must have the frozen bits, dtypes and shapes that were there when the patch was taken. If
        False, frozen leaves are not read, values are converted to the dtypes of ``params``, and leaves may be longer
        now along one axis: their other rows keep their values.

    Returns:
      The parameters with new values: the structure, dtypes, shardings and memory of ``params``, and NumPy arrays where
      it has these. Leaves without new values are the same objects, which a step that donates the result deletes.

    Raises:
      ValueError: if the base is another one; if two patches have a value for the same element; if a leaf is missing, or
        has another shape; if the parameters are not full.
      TypeError: if a patch is not a :class:`Patch`, or arrays have no values, or are traced.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> from optax_freeze import patch
      >>> base = {"encoder": jnp.ones(1000), "head": jnp.ones(2)}
      >>> found = patch.take({**base, "head": jnp.zeros(2)}, "encoder")
      >>> patch.apply(base, found)["head"]
      Array([0., 0.], dtype=float32)
      >>> patch.apply({**base, "encoder": jnp.zeros(1000)}, found)
      Traceback (most recent call last):
          ...
      ValueError: the base differs from the base of the patch
        at: encoder
      ...
    """
    for i, each in enumerate(patches):
        if not isinstance(each, Patch):
            at, fix = f"argument {i + 1}", "patch.apply(params, patch.load(path))"
            what, expected = "patch.apply takes parameters, and patches", "a Patch"
            raise type_error(what, at=at, got=described(each), expected=expected, fix=fix)
    _refuse_half_a_tree(params)
    walk = _tree.walk(params)
    leaves = walk.leaves()
    own = dict(zip(walk.paths, walk.values, strict=True))
    for path, value in own.items():
        refuse_unreadable(value, path, "params")
    for each in patches:
        refuse_missing(each, walk.paths)
        if base:
            refuse_other_base(params, each, walk, leaves)
        else:
            refuse_misfits(each, own)
    refuse_overlap(patches, own)
    for each in patches:
        for trained in each._own:
            own[trained.leaf.path] = put_patch(own[trained.leaf.path], trained)
    return jax.tree.unflatten(walk.treedef, list(own.values()))


def _refuse_half_a_tree(params: PyTree) -> None:
    what, expected = "a patch needs the full parameters", "every full leaf, since the frozen ones are compared"
    _tree.refuse_half_a_tree(params, what, expected, "fz.combine(trainable, rest)")


def _one_name(name: str, path: str, other: str | None) -> ValueError:
    got = f"{path} and {other}" if other not in (None, path) else f"{path}, and the metadata of the file"
    fix = f'rename={{"{path}": "{name}_2"}}'
    return value_error("two tensors with one name in a file", at=name, got=got, expected="a name for each", fix=fix)


def _file_name(path: Any) -> str:
    if not isinstance(path, (str, os.PathLike)):
        at, got = "the first argument", described(path)
        raise type_error("not a file name", at=at, got=got, expected="the name of a file", fix=_CALL)
    return os.path.realpath(os.fspath(path))


def _refuse_other_metadata(metadata: Any) -> None:
    expected, fix = "{name: text}, as safetensors stores them", 'metadata={"license": "apache-2.0"}'
    refuse_no_mapping("metadata", {} if metadata is None else metadata, expected, at="metadata", fix=fix)
    for name, value in (metadata or {}).items():
        if not (isinstance(name, str) and isinstance(value, str)):
            got = f"{described(name)}: {described(value)}"
            raise type_error("metadata are strings", at="metadata", got=got, expected=expected, fix=fix)
        if name == _file.KEY:
            what, got = "metadata: this name is that of the record", name
            raise value_error(what, at="metadata", got=got, expected="another name", fix=fix)
