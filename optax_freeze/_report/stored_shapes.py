"""Which leaves does a checkpoint have? Their paths, shapes and dtypes, without their values.

Only a Flax msgpack file is read through, one array at a time: its shapes alternate with the values. Nothing is
unpickled, and no JAX array is made.
"""

import difflib
import io
import json
import mmap
import pathlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from numpy.lib import format as npy

from optax_freeze._errors import in_one_line, is_int, listed, value_error
from optax_freeze._report.safetensors_format import DTYPES, imported
from optax_freeze._spec import tree as _tree

SUPPORTED = "a directory that Orbax wrote, or a .safetensors, .npz or Flax .msgpack file"


def stored_shapes(checkpoint: epath.Path) -> dict[str, Any]:
    """The leaves of one tree in a file, or in a directory of Orbax, by their paths: shapes of arrays, other objects."""
    tree = _of_orbax(_item(checkpoint)) if checkpoint.is_dir() else _of_file(checkpoint)
    shapes = {leaf.path: value for leaf, value in zip(_tree.leaves(tree), _tree.flatten(tree)[0], strict=True)}
    if shapes and all(path.endswith("/value") for path in shapes):  # an nnx.State
        return {path.removesuffix("/value"): leaf for path, leaf in shapes.items()}
    return shapes


def latest_step(checkpoint: epath.Path) -> epath.Path:
    """The latest step of a ``CheckpointManager``'s directory; anything else itself."""
    if not checkpoint.exists():
        raise _wrong(checkpoint, "no such file or directory", _what_is_there(checkpoint))
    if not checkpoint.is_dir():
        return checkpoint
    steps = [child for child in checkpoint.iterdir() if child.name.isascii() and child.name.isdigit()]
    is_tree = (checkpoint / "_METADATA").exists()
    return max(steps, key=lambda child: int(child.name)) if steps and not is_tree else checkpoint


def _item(step: epath.Path) -> epath.Path:
    """The directory of one tree."""
    if (step / "_METADATA").exists():
        return step
    items = [child for child in step.iterdir() if (child / "_METADATA").exists()]
    named = [item for item in items if item.name == "params"] or items
    if len(named) == 1:
        return named[0]
    if items:
        names = ", ".join(sorted(item.name for item in items))
        raise _wrong(step, f"the items {names}", f"name one: {_listed(items)}")
    below = [metadata.parent for metadata in step.glob("*/*/_METADATA")]
    below = below or [child for child in step.iterdir() if _reader(child)]
    fix = f"name one: {_listed(below)}" if below else "give one that holds _METADATA, by itself or in an item"
    raise _wrong(step, "a directory that Orbax did not write", fix)


def _of_orbax(item: epath.Path) -> Any:
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.metadata(item).item_metadata.tree  # of some damaged files the metadata are None
    except Exception as error:
        fix = "give another step, or write it again"
        raise _wrong(item, "shapes that Orbax cannot read: a damaged checkpoint", fix) from error
    leaves, treedef = _tree.flatten(tree)
    for i, metadata in enumerate(leaves):
        if isinstance(metadata, ocp.metadata.value.ScalarMetadata):
            leaves[i] = np.zeros((), metadata.dtype).item()
        elif hasattr(metadata, "shape"):
            leaves[i] = jax.ShapeDtypeStruct(metadata.shape, metadata.dtype)
    return jax.tree.unflatten(treedef, leaves)


def _of_file(file: epath.Path) -> Any:
    read = _reader(file)
    if read is None:
        fix = "convert it, or call fz.summary on shapes: jax.eval_shape of a function that returns the parameters"
        if (file.parent / "_METADATA").exists():
            fix = f"give the directory that Orbax wrote: {file.parent}"
        raise _wrong(file, f"a {file.suffix} file" if file.suffix else "a file", fix)
    if not file.is_dir() and not pathlib.Path(file).is_file():  # `epath` calls a pipe a file
        raise _wrong(file, "a pipe, a socket or a device", "write what it gives to a file, and name that")
    try:
        found = read(pathlib.Path(file))
    except (ImportError, OSError):
        raise
    except Exception as error:
        got = f"a file without shapes that can be read: it is damaged ({in_one_line(error)})"
        raise _wrong(file, got, "write it again") from error
    return _of_shards(file, found) if read is _shards_of_safetensors else found


def _reader(file: epath.Path) -> Callable[[pathlib.Path], Any] | None:
    """The function that reads such a file; ``checkpoint_1000`` is a name of ``flax.training.checkpoints``."""
    if file.name.endswith(".safetensors.index.json"):
        return _shards_of_safetensors
    is_step = file.name.startswith("checkpoint_") and file.name.removeprefix("checkpoint_").isdecimal()
    return _READERS.get(".msgpack" if is_step and not file.is_dir() else file.suffix)


def _of_safetensors(file: pathlib.Path) -> dict[str, Any]:
    safe_open = imported(str(file)).safe_open
    with safe_open(file, framework="numpy") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        unknown = [s.get_dtype() for s in slices.values() if s.get_dtype() not in DTYPES]
        if unknown:
            raise ValueError(f"the dtype {unknown[0]} is not known here")
        return {name: _struct(s.get_shape(), DTYPES[s.get_dtype()]) for name, s in slices.items()}


def _shards_of_safetensors(index: pathlib.Path) -> dict[str, str]:
    """For each tensor of a model that is stored in several files, the name of its file."""
    return {str(name): str(shard) for name, shard in json.loads(index.read_text())["weight_map"].items()}


def _of_shards(index: epath.Path, shards: Mapping[str, str]) -> dict[str, Any]:
    """All tensors of a model that is stored in several files, each as it is in the file that the index names."""
    names = sorted({*shards.values()})
    if elsewhere := [shard for shard in names if not _is_shard(shard)]:
        got = f"an index that names {', '.join(elsewhere[:3])}"
        raise _wrong(index, got, "take the index and its .safetensors files, in one directory, from the same model")
    if missing := [shard for shard in names if not (index.parent / shard).is_file()]:
        got = f"an index whose files are missing: {_listed([index.parent / shard for shard in missing])}"
        raise _wrong(index, got, "download them, or name a file that is there")
    files = {shard: _of_file(index.parent / shard) for shard in names}
    for name, shard in shards.items():
        if name not in files[shard]:
            got = f"an index that names the tensor {name} in {shard}, which does not contain it"
            raise _wrong(index, got, "take the index and all its files from the same model")
    return {name: files[shard][name] for name, shard in shards.items()}


def _is_shard(name: str) -> bool:
    """Whether an index may name this file: it is beside the index, or below it, and contains tensors."""
    path = pathlib.PurePath(name)
    return not path.is_absolute() and ".." not in path.parts and path.suffix == ".safetensors"


def _of_npz(file: pathlib.Path) -> dict[str, Any]:
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.endswith(".npy")]
        if archive.namelist() and not names:
            raise ValueError("a zip file without arrays")  # an empty one has no leaves
        return {name.removesuffix(".npy"): _of_npy(archive, name) for name in names}


_BYTES_OF_LENGTH = {(1, 0): 2, (2, 0): 4, (3, 0): 4}  # of the header, by the version of the format
_LONGEST_HEADER = 10_000


def _of_npy(archive: zipfile.ZipFile, name: str) -> Any:
    with archive.open(name) as member:
        version = npy.read_magic(member)
        if version not in _BYTES_OF_LENGTH:
            raise ValueError(f"{name}: the version {version[0]}.{version[1]} of the format is not known here")
        length = member.read(_BYTES_OF_LENGTH[version])
        size = int.from_bytes(length, "little")
        if size > _LONGEST_HEADER:  # NumPy reads a header before it refuses a long one
            raise ValueError(f"{name}: a header of {size:,} bytes")
        # A header of version 3 is one of version 2 with field names in UTF-8; an array with fields is not a parameter.
        header = io.BytesIO(length + member.read(size))
        shape, _, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(header)
    if dtype == np.dtype("V2"):
        return _struct(shape, jnp.bfloat16)  # NumPy writes its size without its name
    return _struct(shape, dtype.newbyteorder("=")) if dtype.kind in "biufc" else str(dtype)


def _of_msgpack(file: pathlib.Path) -> Any:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        tree = msgpack.unpackb(data, ext_hook=_leaf_of_msgpack, raw=False, strict_map_key=False)
    if not isinstance(tree, Mapping):
        raise ValueError("not a tree")
    return _joined(tree)


def _leaf_of_msgpack(code: int, data: bytes) -> Any:
    """What Flax writes as an extension: an array or a NumPy scalar as shape, dtype and values, or a complex number."""
    if code not in (1, 3):
        return 0j if code == 2 else "an object"
    start = msgpack.Unpacker()
    start.feed(data[:1024])
    start.read_array_header()
    return _struct(start.unpack(), start.unpack())


def _joined(tree: Any) -> Any:
    """A tree in which arrays of more than 1 GiB, which Flax writes in chunks, are one leaf."""
    if not isinstance(tree, Mapping):
        return tree
    if "__msgpack_chunked_array__" in tree:
        return _struct([tree["shape"][str(axis)] for axis in range(len(tree["shape"]))], tree["chunks"]["0"].dtype)
    return {str(key): _joined(child) for key, child in tree.items()}


_READERS = {".safetensors": _of_safetensors, ".npz": _of_npz, ".msgpack": _of_msgpack}


def _struct(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    if not all(is_int(size) and size >= 0 for size in shape):
        raise ValueError(f"not a shape: {shape}")
    return jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))


def _what_is_there(missing: epath.Path) -> str:
    """A hint for a path that does not exist: what lies beside its first missing segment."""
    while missing.parent != missing and not missing.parent.exists():
        missing = missing.parent
    above = missing.parent
    children = above.iterdir() if above.is_dir() else []
    beside = {child.name: child for child in children if child.is_dir() or _reader(child)}
    near = difflib.get_close_matches(missing.name, beside)
    near = near or [name for name, child in beside.items() if not child.is_dir() or any(child.glob("_*METADATA"))]
    return f"there is {_listed([beside[name] for name in near])}" if near else f"look into {above.resolve()}"


def _listed(paths: Sequence[epath.Path]) -> str:
    """Paths, three at most."""
    return listed(sorted(map(str, paths)))


def _wrong(checkpoint: epath.Path, got: str, fix: str) -> ValueError:
    return value_error("not a checkpoint of one tree", at=str(checkpoint), got=got, expected=SUPPORTED, fix=fix)
