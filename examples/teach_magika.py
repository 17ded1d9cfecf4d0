"""Teach a shipped model file types that it does not know, without changing a bit of what it knows.

Magika is Google's classifier of file types (Apache-2.0); its wheel has the weights as ONNX. New columns of its head
learn four types from ten files of each. Beside it the whole head trains, and with --everything (minutes) all of it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

import optax_freeze as fz
from optax_freeze import checkpoint


def teach(logits: Any, params: Any, frozen: Any, rate: float, batches: Any, data: Any, directory: str) -> Any:
    """Trains what is not frozen, and saves it; returns the state of the optimizer."""
    tokens, labels = data
    tx, once, small, inputs = fz.freeze(optax.adam(rate), frozen), None, params, (tokens,)
    if frozen is not False:  # the trunk runs once for each file
        once = fz.precompute(logits, frozen, example_axis=0)
        small, inputs = once.needed(params, tokens), (jax.jit(once.before)(params, tokens), tokens)
    small, of_small = jax.tree.map(jnp.copy, small), once.after if once else logits  # the step takes its arguments
    loss = lambda params, labels, *inputs: cross_entropy(of_small(params, *inputs), labels).mean()  # noqa: E731
    step, state = jax.jit(fz.train_step(loss, tx), donate_argnums=(0, 1)), tx.init(small)
    for rows in batches:
        batch = jax.tree.map(lambda array, rows=rows: array[rows], (labels, *inputs))
        small, state, _ = step(small, state, *batch)
    checkpoint.save(directory, once.combine(small, params) if once else small, frozen, step=1)
    return state


# %%
import argparse
import collections
import importlib.metadata
import json
import pathlib
import tempfile
import time
import zlib

import flax.linen as nn
import magika
import numpy as np
import onnx
import onnxruntime
from matplotlib.figure import Figure

FOLDER = pathlib.Path(magika.__file__).parent / "models" / "standard_v3_3"
KNOWN = json.loads((FOLDER / "config.min.json").read_text())["target_labels_space"]
NEW, OLD, SETS = ("METADATA", "RECORD", "TZif", ".pyi"), len(KNOWN), ("train", "train", "tune", "test")
RATES = {"new columns": 3e-3, "whole head": 3e-3, "everything": 1e-3}  # by --tune, on new and old types of the data
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


def files(part: str, new: int, others: int) -> Any:
    """Kind and tokens of different files, of the packages of one of the SETS."""
    found, chosen = collections.defaultdict(list), {}
    for package in importlib.metadata.distributions():
        for path in package.files or ():
            is_zone = "zoneinfo" in path.parts and not path.suffix  # these are all of one package
            if SETS[zlib.crc32(path.read_binary() if is_zone else package.name.encode()) % 4] == part:
                kind = "TZif" if is_zone else path.name if ".dist-info" in path.parts[0] else path.suffix
                found[kind].append((zlib.crc32(str(path).encode()), path.locate()))
    for kind, paths in sorted(found.items()):
        for _, path in sorted(paths)[: new if kind in NEW else others]:
            first, last = (data := path.read_bytes())[:4096].lstrip()[:1024], data[-4096:].rstrip()[-1024:]
            chosen[first + last] = kind, np.array([*first, *[256] * (2048 - len(first) - len(last)), *last], np.int32)
    return map(np.array, zip(*chosen.values(), strict=True))


def answers(params: Any, tokens: Any) -> np.ndarray:
    padded, run = np.resize(tokens, (-(-len(tokens) // 32) * 32, 2048)), jax.jit(logits)
    return np.concatenate([run(params, padded[i : i + 32]) for i in range(0, len(tokens), 32)])[: len(tokens)]


def labelled(params: Any, *which: Any) -> Any:
    """Tokens, labels and old logits; the label of an old type is Magika's own answer, or -1 if it is not sure."""
    kinds, tokens = files(*which)
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
    parser.add_argument("--files", type=int, default=5, choices=range(1, 101), metavar="N", help="of a type, to test")
    parser.add_argument("--everything", action="store_true", help="train all parameters, too (minutes)")
    parser.add_argument("--tune", action="store_true", help="try three rates, on other packages than the test's")
    parser.add_argument("--picture", default="teach_magika.png")
    args = parser.parse_args()
    init, tokens = jax.jit(Magika(OLD + len(NEW)).init), np.zeros((1, 2048), np.int32)
    params, frozen, report = fz.merge_pretrained(init(jax.random.key(0), tokens)["params"], shipped())
    tokens, labels, known = labelled(params, "tune" if args.tune else "test", args.files, args.files)
    original: Any = onnxruntime.InferenceSession(FOLDER / "model.onnx").run(None, {"bytes": tokens[:32]})[0]
    print(f"{report}\nscores differ from the original by at most {abs(original - nn.softmax(known[:32])).max():.0e}")
    inputs, targets, mistaken = labelled(params, "train", 10, 4)
    seen = [*mistaken[targets >= OLD].argmax(1), *range(0, OLD, 2), *range(OLD, OLD + len(NEW))]
    data, is_seen = [array[np.isin(targets, seen)] for array in (inputs, targets)], np.isin(labels, seen)
    batches = np.random.default_rng(0).integers(len(data[0]), size=(args.steps, 16))
    groups = {kind: labels == i for i, kind in enumerate(NEW, OLD)}
    groups |= {"old, trained on": is_seen & (labels < OLD), "other old": ~is_seen & (labels >= 0)}
    right = lambda found: [100 * (found.argmax(1) == labels)[group].mean() for group in groups.values()]  # noqa: E731
    shares: dict[str, Any] = {"% right of": [*groups], "as shipped": right(known)}
    ways = {"new columns": frozen, "whole head": fz.all_except("Dense_1")}
    ways |= {"everything": False} if args.everything else {}
    for name, rate in [(name, RATES[name] * by) for name in ways for by in ((1 / 3, 1, 3) if args.tune else (1,))]:
        with tempfile.TemporaryDirectory() as directory:
            start = time.process_time()
            state = teach(logits, params, ways[name], rate, batches, data, directory)
            seconds, held = time.process_time() - start, sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            stored = sum(path.stat().st_size for path in pathlib.Path(directory).rglob("*") if path.is_file())
            restored, _ = checkpoint.restore(directory, params)  # onto the shipped model
        taught = answers(restored, tokens)
        assert name != "new columns" or taught[:, :OLD].tobytes() == known.tobytes()  # every old logit has its bits
        shares[f"{name}, rate {rate:.0e}" if args.tune else name] = right(taught)
        print(f"{name}: {seconds:.0f} CPU seconds, {held:,} bytes of optimizer state, {stored:,} of checkpoint")
    for name, row in shares.items():
        print(f"{name:20}", *(f"{each:.0f}".rjust(15) if isinstance(each, float) else each.rjust(15) for each in row))
    draw(shares, args.picture)


if __name__ == "__main__":
    main()
