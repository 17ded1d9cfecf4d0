"""Add 16 tokens to a language model and train only their rows of the embedding.

A small character model learns the docstrings of NumPy. Its vocabulary then grows by 16 frequent
words of the text: 16 more rows of the embedding, which is also the matrix of the head. Only these
rows train. All other parameters, including the old rows, keep their bits, and the gradient and the
optimizer state have the size of the new rows.

Run with ``python examples/new_token_rows.py``.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

import optax_freeze as fz


def with_new_rows(params: Any, count: int) -> tuple[Any, Any]:
    """The parameters with more rows in the embedding, and a spec that trains only these."""
    old = params["embed"]["embedding"]
    embedding = jnp.concatenate([old, jnp.tile(old.mean(0), (count, 1))])
    frozen = fz.rules({"embed/embedding": fz.rows(slice(0, len(old)))}, default=True)
    return {**params, "embed": {"embedding": embedding}}, frozen


def train(loss: Any, params: Any, frozen: Any, inner: Any, batches: Iterable[Any]) -> Any:
    """The parameters after a step on each batch."""
    tx = fz.freeze(inner, frozen)
    step, state = jax.jit(fz.train_step(loss, tx)), tx.init(params)
    for batch in batches:
        params, state, _ = step(params, state, batch)
    return params


# %%
import argparse
import collections
import inspect
import re

import flax.linen as nn
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

NEW, WIDTH, LENGTH, BATCH = 16, 64, 64, 16


class LanguageModel(nn.Module):
    """Tokens of shape (n, length) to logits, by one block of causal attention; the head is the embedding."""

    vocabulary: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, WIDTH, name="embed")
        x = embed(tokens) + self.param("position", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, name="attention")(
            nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens)
        )
        x = x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm(name="norm")(x))


def tokenize(text: str, vocabulary: list[str]) -> np.ndarray:
    """Token numbers, longest tokens first."""
    number = {token: i for i, token in enumerate(vocabulary)}
    pattern = "|".join(re.escape(token) for token in sorted(vocabulary, key=len, reverse=True))
    return np.array([number[token] for token in re.findall(pattern, text)], np.int32)


def windows_of(tokens: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Random windows of the text."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - LENGTH - 1, n)
    return tokens[starts[:, None] + np.arange(LENGTH + 1)]


def loss(params: Any, windows: jax.Array, mean: bool = True) -> jax.Array:
    """Cross entropy of the next token, in nats, or of each; the vocabulary is as large as the embedding."""
    logits = LanguageModel(len(params["embed"]["embedding"])).apply({"params": params}, windows[:, :-1])
    entropies = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), windows[:, 1:])
    return entropies.mean() if mean else entropies


def batches_of(tokens: np.ndarray, steps: int, title: str) -> Iterable[np.ndarray]:
    """Batches of random windows, with a progress bar."""
    return track(windows_of(tokens, steps * BATCH, seed=0).reshape(steps, BATCH, -1), title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="steps of the first training; half as many for the rows")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps: got {args.steps}, expected at least 2")
    console, adam = Console(), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))

    documents = (inspect.getdoc(getattr(np, name)) or "" for name in sorted(np.__all__))
    text = re.sub(r"[^\n -~]", " ", "\n\n".join(documents))
    learned, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    counts, characters = collections.Counter(re.findall(r" [a-z]{3,}", text)), sorted(set(text))
    words = sorted(counts, key=lambda word: counts[word] * (len(word) - 1), reverse=True)[:NEW]  # shorten the text most
    console.print(f"{len(text):,} characters of text; {len(characters)} characters, and {NEW} new tokens: {words}")

    base = LanguageModel(len(characters)).init(jax.random.key(0), jnp.zeros((1, LENGTH), int))["params"]
    batches = batches_of(tokenize(learned, characters), args.steps, "train on characters")
    base = train(loss, base, False, adam, batches)

    vocabulary, (params, frozen) = characters + words, with_new_rows(base, NEW)
    new_text = tokenize(learned, vocabulary)
    console.print(fz.summary(params, frozen, adam, depth=1))
    print(fz.explain(loss, params, frozen, windows_of(new_text, BATCH, seed=0)))
    trained = train(loss, params, frozen, adam, batches_of(new_text, args.steps // 2, f"train {NEW} rows"))
    fz.assert_frozen(params, trained, frozen)

    tokens = tokenize(held_out, vocabulary)
    windows, scale = windows_of(tokens, 128, seed=1), len(tokens) / len(held_out)
    new = windows[:, 1:] >= len(characters)
    nats = [np.asarray(jax.jit(loss, static_argnames="mean")(p, windows, mean=False)) for p in (params, trained)]
    table = Table("on held-out text", "before", "after", title=f"{NEW} new rows of {len(vocabulary)} trained")
    table.add_row("loss, nats per character", *(f"{each.mean() * scale:.3f}" for each in nats))
    table.add_row("chance of the right new token", *(f"{np.exp(-each[new]).mean():.1%}" for each in nats))
    table.add_row("tokens", f"{len(held_out):,}", f"{len(tokens):,}")
    console.print(table)
    console.print("no bit of the old rows and of all other parameters moved (fz.assert_frozen)")


if __name__ == "__main__":
    main()
