"""Teach a shipped model file types that it does not know, without changing a bit of what it knows.

Magika is Google's classifier of file types (Apache-2.0); its wheel has the weights as ONNX. New
columns of its head learn four types from ten files of each: time zones, and files of JAX that this
script makes. Beside it the whole head trains, and with --everything (minutes) all of it. The shares
of right answers are means of three draws of the files.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

import optax_freeze as fz
from optax_freeze import checkpoint


def teach(logits: Any, params: Any, frozen: Any, rate: Any, chosen: Any, data: Any, to: str) -> Any:
    """Trains what is not frozen, and saves it; returns the state of the optimizer."""
    tokens, labels = data
    tx, once, small, inputs = fz.freeze(optax.adam(rate), frozen), None, params, (tokens,)
    if frozen is not False:  # the trunk runs once for each file
        once = fz.precompute(logits, frozen, example_axis=0)
        small, inputs = once.needed(params, tokens), (jax.jit(once.before)(params, tokens), tokens)
    small, of_small = jax.tree.map(jnp.copy, small), once.after if once else logits  # to be donated
    loss = lambda params, labels, *inputs: cross_entropy(of_small(params, *inputs), labels).mean()
    step, state = jax.jit(fz.train_step(loss, tx), donate_argnums=(0, 1)), tx.init(small)
    for rows in chosen:
        batch = jax.tree.map(lambda array, rows=rows: array[rows], (labels, *inputs))
        small, state, _ = step(small, state, *batch)
    checkpoint.save(to, once.combine(small, params) if once else small, frozen, step=1)
    return state


# %%
import argparse
import collections
import importlib.metadata
import json
import pathlib
import re
import tempfile
import zlib
from collections.abc import Iterator

import flax.linen as nn
import flax.serialization
import magika
import numpy as np
import onnx
import onnxruntime
from matplotlib.figure import Figure

FOLDER = pathlib.Path(magika.__file__).parent / "models" / "standard_v3_3"
KNOWN = json.loads((FOLDER / "config.min.json").read_text())["target_labels_space"]
NEW, OLD = ("TZif", "StableHLO", "MessagePack", "safetensors"), len(KNOWN)
FIRST = {"test": 0, "train": 200}  # the number of a new file
DECLARED = [x for x in importlib.metadata.requires("optax-freeze") or () if "extra" not in x or "examples" in x]
PACKAGES = [importlib.metadata.distribution(re.split(r"[^\w-]", each)[0]) for each in DECLARED]
RATES = {"new columns": 3e-3, "whole head": 3e-3, "everything": 1e-3}
PATHS = {"Const:0": "Dense_0/kernel", "Const_24:0": "Dense_1/kernel", "const_fold_opt__209": "Conv_0/bias"}
PATHS |= {"Conv_0/transpose_3:0": "Conv_0/kernel"} | {f"Dense_{i}/Reshape:0": f"Dense_{i}/bias" for i in (0, 1)}
PATHS |= {f"LayerNorm_{i}/Reshape_{n}:0": f"LayerNorm_{i}/{('scale', 'bias')[n - 2]}" for i in (0, 1) for n in (2, 3)}


class Magika(nn.Module):
    types: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.gelu(nn.Dense(64)(jax.nn.one_hot(tokens, 257))).reshape(-1, 512, 256)
        x = nn.gelu(nn.Conv(512, 5, padding="VALID")(nn.LayerNorm(reduction_axes=1, feature_axes=1)(x)))
        return nn.Dense(self.types)(nn.LayerNorm()(x.max(1)))


def logits(params: Any, tokens: Any) -> Any:
    return Magika(params["Dense_1"]["bias"].size).apply({"params": params}, tokens)


def shipped() -> Any:
    """The weights of the ONNX graph, by their paths in Linen."""
    params = {}
    for each in onnx.load(FOLDER / "model.onnx").graph.initializer:
        if path := PATHS.get(each.name.split("V2/")[-1].split("logits_/")[-1]):
            array = onnx.numpy_helper.to_array(each).squeeze()
            params[path] = array.T if array.ndim == 3 else array
    return params


def made(kind: str, number: int) -> bytes:
    """A file of a type that is new to Magika, the same one for the same number."""
    rng = np.random.default_rng(number)
    shape, chosen = rng.integers(2, 20, 2).tolist(), rng.integers(0, 8, rng.integers(2, 9)).tolist()
    if kind == "StableHLO":
        steps = [jnp.sin, jnp.tanh, jnp.cumsum, jnp.sort, jnp.ravel, jax.nn.relu, jnp.flip, lambda x: x / x.sum()]
        program = jax.jit(lambda x: [x := steps[i](x) for i in chosen][-1])
        return program.lower(jax.ShapeDtypeStruct(shape, jnp.float32)).as_text().encode()
    arrays = {f"layer_{i}": {"kernel": rng.normal(size=shape).astype(np.float32)} for i in chosen}
    if kind == "MessagePack":
        return flax.serialization.msgpack_serialize(arrays)
    data, header = b"", {}
    for name, layer in arrays.items():
        start, data = len(data), data + layer["kernel"].tobytes()
        header[f"{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def old_files(part: str, count: int) -> Iterator[tuple[str, bytes]]:
    """Files of the packages that this example declares, by their suffix; those to learn from are others."""
    found = collections.defaultdict(list)
    for path in (path for package in PACKAGES for path in package.files or () if ".dist-info" not in path.parts[0]):
        if path.suffix not in ("", ".pyc") and (crc := zlib.crc32(str(path).encode())) % 2 == (part == "train"):
            found[path.suffix].append((crc // 2, path))
    for kind, paths in sorted(found.items()):
        yield from ((kind, path.read_binary()) for _, path in sorted(paths)[:count])


def new_files(part: str, count: int, draw: int) -> Iterator[tuple[str, bytes]]:
    names = importlib.metadata.files("tzdata") or ()
    zones = {path.read_binary() for path in names if "zoneinfo" in path.parts and not path.suffix}
    zones = sorted(zones, key=zlib.crc32)
    for number in range(first := FIRST[part] + draw * count, first + count):
        yield from ((kind, zones[number] if kind == "TZif" else made(kind, number)) for kind in NEW)


def tokens_of(data: bytes) -> np.ndarray:
    first, last = data[:4096].lstrip()[:1024], data[-4096:].rstrip()[-1024:]
    return np.array([*first, *[256] * (2048 - len(first) - len(last)), *last], np.int32)


def answers(params: Any, tokens: Any) -> np.ndarray:
    padded, run = np.resize(tokens, (-(-len(tokens) // 32) * 32, 2048)), jax.jit(logits)
    return np.concatenate([run(params, padded[i : i + 32]) for i in range(0, len(tokens), 32)])[: len(tokens)]


def labelled(params: Any, part: str, new: int, others: int, draw: int = 0) -> Any:
    """Tokens, labels and old logits; the label of an old type is Magika's own answer, or -1 if it is not sure."""
    files = [*new_files(part, new, draw), *old_files(part, others)]
    kinds, tokens = [kind for kind, _ in files], np.stack([tokens_of(data) for _, data in files])
    known = answers(params, tokens)[:, :OLD]
    sure = np.where(nn.softmax(known).max(1) >= 0.5, known.argmax(1), -1)
    return tokens, np.array([OLD + NEW.index(k) if k in NEW else i for k, i in zip(kinds, sure, strict=True)]), known


def draw(shares: dict[str, Any], path: str) -> None:
    groups, *bars = shares.items()
    axis = (figure := Figure(figsize=(10, 3.5), layout="constrained")).subplots()
    for i, (name, each) in enumerate(bars):
        axis.bar(np.arange(len(each)) + 0.8 * i / len(bars), each, 0.8 / len(bars), label=name)
    axis.set(xticks=np.arange(len(groups[1])) + 0.3, xticklabels=groups[1], ylabel="% right answers", ylim=(0, 105))
    figure.legend(loc="outside upper center", ncols=len(bars))
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, choices=range(1, 1001), metavar="N", help="1 to 1000")
    parser.add_argument(
        "--files", type=int, default=30, choices=range(1, 101), metavar="N", help="of a new type, to test"
    )
    parser.add_argument("--draws", type=int, default=3, choices=range(1, 5), metavar="N", help="of files to learn from")
    parser.add_argument("--everything", action="store_true", help="train all parameters, too (minutes)")
    parser.add_argument("--picture", default="teach_magika.png")
    args = parser.parse_args()
    init, tokens = jax.jit(Magika(OLD + len(NEW)).init), np.zeros((1, 2048), np.int32)
    params, frozen, report = fz.merge_pretrained(init(jax.random.key(0), tokens)["params"], shipped())
    tokens, labels, known = labelled(params, "test", args.files, 8)
    original: Any = onnxruntime.InferenceSession(FOLDER / "model.onnx").run(None, {"bytes": tokens[:32]})[0]
    print(f"{report}\nscores differ from the original by at most {abs(original - nn.softmax(known[:32])).max():.0e}")
    ways = {"new columns": frozen, "whole head": fz.all_except("Dense_1")}
    ways |= {"everything": False} if args.everything else {}
    groups, rows = {}, collections.defaultdict(list)
    for number in range(args.draws):
        inputs, targets, mistaken = labelled(params, "train", 10, 4, number)
        seen = [*mistaken[targets >= OLD].argmax(1), *range(0, OLD, 2), *range(OLD, OLD + len(NEW))]
        data, is_seen = [array[np.isin(targets, seen)] for array in (inputs, targets)], np.isin(labels, seen)
        batches = np.random.default_rng(0).integers(len(data[0]), size=(args.steps, 16))
        groups = {kind: labels == i for i, kind in enumerate(NEW, OLD)}
        groups |= {"old, trained on": is_seen & (labels < OLD), "other old": ~is_seen & (labels >= 0)}
        right = lambda found, of=groups: [100 * (found.argmax(1) == labels)[each].mean() for each in of.values()]
        rows["as shipped"].append(right(known))
        for name, frozen in ways.items():
            with tempfile.TemporaryDirectory() as directory:
                state = teach(logits, params, frozen, RATES[name], batches, data, directory)
                held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
                stored = sum(path.stat().st_size for path in pathlib.Path(directory).rglob("*") if path.is_file())
                restored, _ = checkpoint.restore(directory, params)  # onto the shipped model
            taught = answers(restored, tokens)
            assert name != "new columns" or taught[:, :OLD].tobytes() == known.tobytes()  # every old logit has its bits
            rows[name].append(right(taught))
            print(f"{name}: {held:,} bytes of optimizer state, {stored:,} of checkpoint")
    shares: dict[str, Any] = {"% right of": [*groups]} | {name: np.mean(each, 0) for name, each in rows.items()}
    for name, row in shares.items():
        print(f"{name:20}", *(f"{each:.0f}".rjust(15) if isinstance(each, float) else each.rjust(15) for each in row))
    draw(shares, args.picture)


if __name__ == "__main__":
    main()
