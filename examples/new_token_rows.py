"""Add 16 tokens to a language model and train their rows alone.

A small character model learns the docstrings of NumPy, which come with its wheel. Its vocabulary then grows by 16
tokens, frequent words of the text: 16 more rows of the embedding, which is the head's matrix, too. Only these rows
train. Every other parameter, the old rows among them, keeps its bits; the gradient and the optimizer's state have the
size of the new rows, since lookup and head read the old ones where they lie.

Run with ``python examples/new_token_rows.py``; takes a minute on two cores.
"""

import argparse
import collections
import inspect
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import optax_freeze as fz

NEW, WIDTH, LENGTH, BATCH = 16, 96, 64, 32
console = Console()


class Block(nn.Module):
    """Causal self-attention and an MLP."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(num_heads=4, name="attention")
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm()(x))))


class LanguageModel(nn.Module):
    """Tokens of shape (n, length) to logits; the head is the embedding."""

    vocabulary: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, WIDTH, name="embed")
        x = embed(tokens) + self.param("position", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        for i in range(2):
            x = Block(name=f"block_{i}")(x)
        return embed.attend(nn.LayerNorm(name="norm")(x))


def read_text() -> str:
    """The docstrings of NumPy's public functions and classes: half a megabyte of technical English."""
    documents = (inspect.getdoc(getattr(np, name)) or "" for name in sorted(np.__all__))
    text = "\n\n".join(documents)
    return re.sub(r"[^\n -~]", " ", text)


def frequent_words(text: str) -> list[str]:
    """The words with a space before them that shorten the text most."""
    counts = collections.Counter(re.findall(r" [a-z]{3,}", text))
    saved = sorted(counts, key=lambda word: (-counts[word] * (len(word) - 1), word))
    return saved[:NEW]


def tokenise(text: str, vocabulary: list[str]) -> np.ndarray:
    """Token numbers, longest tokens first."""
    number = {token: i for i, token in enumerate(vocabulary)}
    pattern = "|".join(re.escape(token) for token in sorted(vocabulary, key=len, reverse=True))
    return np.array([number[token] for token in re.findall(pattern, text)], np.int32)


def loss_of(model: LanguageModel) -> Callable[[Any, jax.Array], jax.Array]:
    """Mean cross entropy, in nats per token, of windows of shape (n, LENGTH + 1)."""

    def loss(params: Any, windows: jax.Array) -> jax.Array:
        logits = jnp.asarray(model.apply({"params": params}, windows[:, :-1]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    return loss


def windows_of(tokens: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Random windows of the text."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - LENGTH - 1, n)
    return tokens[starts[:, None] + np.arange(LENGTH + 1)]


def train(title: str, step: Any, params: Any, state: Any, tokens: np.ndarray, steps: int) -> Any:
    """Steps on random windows; the parameters."""
    windows = windows_of(tokens, steps * BATCH, seed=0).reshape(steps, BATCH, LENGTH + 1)
    with Progress(console=console) as progress:
        for batch in progress.track(windows, description=title):
            params, state = step(params, state, batch)
    return params


def nats_per_character(model: LanguageModel, params: Any, tokens: np.ndarray, text: str) -> float:
    """The mean loss on held-out windows, per character of the text, so that vocabularies can be compared."""
    per_token = float(jax.jit(loss_of(model))(params, windows_of(tokens, 128, seed=1)))
    return per_token * len(tokens) / len(text)


def chance_of_new(model: LanguageModel, params: Any, tokens: np.ndarray) -> float:
    """The mean probability of the right token where held-out text goes on with a new one."""
    windows = windows_of(tokens, 128, seed=1)
    logits = jnp.asarray(jax.jit(model.apply)({"params": params}, windows[:, :-1]))
    right = jnp.take_along_axis(jax.nn.softmax(logits), windows[:, 1:, None], -1)[..., 0]
    return float(right[windows[:, 1:] >= model.vocabulary - NEW].mean())


def write(model: LanguageModel, params: Any, vocabulary: list[str], start: str, n: int) -> tuple[str, int]:
    """Text that the model goes on with, and how many of its tokens are new ones."""

    @jax.jit
    def next_token(window: jax.Array, at: jax.Array, key: jax.Array) -> jax.Array:
        logits = jnp.asarray(model.apply({"params": params}, window[None]))[0, at]
        return jax.random.categorical(key, logits / 0.7)

    tokens = list(tokenise(start, vocabulary))
    given = len(tokens)
    for key in jax.random.split(jax.random.key(0), n):
        window = np.zeros(LENGTH, np.int32)
        recent = tokens[-LENGTH:]
        window[: len(recent)] = recent
        tokens.append(int(next_token(window, jnp.int32(len(recent) - 1), key)))
    new = sum(token >= len(vocabulary) - NEW for token in tokens[given:])
    return "".join(vocabulary[token] for token in tokens), new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="steps of the first training; half as many for the rows")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps: got {args.steps}, expected at least 2")

    text = read_text()
    split = len(text) * 9 // 10
    learned, held_out = text[:split], text[split:]
    characters = sorted(set(text))
    words = frequent_words(text)
    console.print(f"{len(text):,} characters of text; {len(characters)} characters, and {NEW} new tokens: {words}")

    old_model, old_vocabulary = LanguageModel(len(characters)), characters
    base = old_model.init(jax.random.key(0), jnp.zeros((1, LENGTH), int))["params"]
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(3e-3, args.steps)))

    @jax.jit
    def first_step(params: Any, state: Any, windows: jax.Array) -> tuple[Any, Any]:
        updates, state = adam.update(jax.grad(loss_of(old_model))(params, windows), state, params)
        return optax.apply_updates(params, updates), state

    base = train("train on characters", first_step, base, adam.init(base), tokenise(learned, characters), args.steps)

    vocabulary = old_vocabulary + words
    model = LanguageModel(len(vocabulary))
    old_rows = base["embed"]["embedding"]
    new_rows = jnp.tile(old_rows.mean(0), (NEW, 1))
    params = {**base, "embed": {"embedding": jnp.concatenate([old_rows, new_rows])}}

    frozen = fz.rules({"embed/embedding": ~fz.rows(slice(len(characters), None))}, default=True)
    tx = fz.freeze(optax.adam(1e-2), frozen, full_updates=False)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, windows: jax.Array) -> tuple[Any, Any]:
        grads = fz.grad(loss_of(model), frozen)(params, windows)
        updates, state = tx.update(grads, state, params)
        return fz.apply_updates(params, updates), state

    print(fz.explain(loss_of(model), params, frozen, windows_of(tokenise(learned, vocabulary), BATCH, seed=0)))
    trained = train(f"train {NEW} rows", step, params, state, tokenise(learned, vocabulary), max(1, args.steps // 2))

    old_bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(base)]
    now = {**trained, "embed": {"embedding": trained["embed"]["embedding"][: len(characters)]}}
    same = old_bits == [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(now)]
    tokens = tokenise(held_out, vocabulary)
    state_bytes = [sum(x.nbytes for x in jax.tree.leaves(s)) for s in (optax.adam(1e-2).init(params), state)]
    before, after = (nats_per_character(model, p, tokens, held_out) for p in (params, trained))
    chances = [chance_of_new(model, p, tokens) for p in (params, trained)]

    table = Table("", "before", "after", title=f"{NEW} new rows of {len(vocabulary)} trained")
    table.add_row("held-out loss, nats per character", f"{before:.3f}", f"{after:.3f}")
    table.add_row("chance of the right new token", f"{chances[0]:.1%}", f"{chances[1]:.1%}")
    table.add_row("tokens of the held-out text", f"{len(held_out):,}", f"{len(tokens):,}")
    table.add_section()
    table.add_row("optimizer state, everything / the rows", f"{state_bytes[0]:,} bytes", f"{state_bytes[1]:,} bytes")
    table.add_row("old rows and all other parameters", "", "the same bits" if same else "MOVED")
    console.print(table)
    for title, p in (("before", params), ("after", trained)):
        sample, new = write(model, p, vocabulary, "Parameters\n----------\na : array_like\n    The", 240)
        console.rule(f"{title}: {new} of 240 tokens are new ones")
        console.print(sample, markup=False, highlight=False)


if __name__ == "__main__":
    main()
