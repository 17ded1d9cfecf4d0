"""Train a diffusion model in the latent space of a frozen VAE, whose encoder runs only once.

A VAE learns rotated digits. A denoiser (flow matching) then learns to generate their latents, twice
with the same loss: with the encoder in every step, and with its mean and spread on disk, computed
once for three rotations of each image. Each epoch draws one rotation of each image and samples the
latents anew.
"""

from typing import Any

import jax

import optax_freeze as fz
from optax_freeze import features

FROZEN = fz.all_except("denoiser")  # all other parameters


def store(directory: str, loss: Any, params: Any, batches: Any, *others: Any) -> Any:
    """Stores mean and spread; the loss's key does not recur. A batch is a list of its variants."""
    once = fz.precompute(loss, FROZEN, recurring="images", example_axis=0)
    variants = len(batches[0])
    features.write(directory, once, params, batches, *others, variants=variants, progress=False)
    return once, features.read(directory, once, params)


def training(loss: Any, optimizer: Any, frozen: Any = FROZEN) -> Any:
    """The optimizer of the trainable parameters, and a compiled step."""
    tx = fz.freeze(optimizer, frozen)
    return tx, jax.jit(fz.train_step(loss, tx))


# %%
import argparse
import tempfile

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

LATENT, BATCH, KEY, ADAM = 8, 64, jax.random.key(0), optax.adam(1e-3)


def perceptron(width: int, size: int) -> nn.Sequential:
    return nn.Sequential([nn.Dense(width), nn.gelu, nn.Dense(width), nn.gelu, nn.Dense(size)])


NETS = {"encoder": perceptron(512, 2 * LATENT), "decoder": perceptron(256, 64), "denoiser": perceptron(256, LATENT)}
INPUTS = {"encoder": 64, "decoder": LATENT, "denoiser": LATENT + 11}  # the time and the digit


def apply(name: str, params: Any, x: jax.Array) -> jax.Array:
    return jnp.asarray(NETS[name].apply(params[name], x))


def sampled(params: Any, images: jax.Array, key: jax.Array) -> Any:
    mean, log_variance = jnp.split(apply("encoder", params, images), 2, axis=-1)
    latents = mean + jnp.exp(log_variance / 2) * jax.random.normal(key, mean.shape)
    return latents, 0.5 * jnp.mean(jnp.sum(mean**2 + jnp.exp(log_variance) - 1 - log_variance, -1))


def loss_of_vae(params: Any, images: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
    latents, divergence = sampled(params, images, key)
    return 10 * jnp.mean(jnp.sum((apply("decoder", params, latents) - images) ** 2, -1)) + divergence


def velocity(params: Any, x: jax.Array, t: Any, labels: Any) -> jax.Array:
    inputs = [x, jnp.broadcast_to(t, (len(x), 1)), jax.nn.one_hot(labels, 10)]
    return apply("denoiser", params, jnp.concatenate(inputs, axis=-1))


def loss(params: Any, images: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
    of_latents, of_noise, of_t = jax.random.split(key, 3)
    latents, _ = sampled(params, images, of_latents)
    noise, t = jax.random.normal(of_noise, latents.shape), jax.random.uniform(of_t, (len(latents), 1))
    return jnp.mean((velocity(params, (1 - t) * noise + t * latents, t, labels) - (latents - noise)) ** 2)


def train(params: Any, method: Any, batch_of: Any, count: int, epochs: int) -> Any:
    """The parameters, the loss of each step, and the MFLOPs of a step."""
    (tx, step), rng, losses = method, np.random.default_rng(0), []
    state = tx.init(params)
    compiled = step.lower(params, state, *batch_of(0, np.arange(BATCH)), KEY).compile()
    for epoch in range(epochs):
        for chosen in rng.permutation(count).reshape(-1, BATCH):
            key = jax.random.fold_in(KEY, len(losses))
            params, state, value = compiled(params, state, *batch_of(epoch, chosen), key)
            losses.append(value)
    return params, np.array(losses), (compiled.cost_analysis() or {})["flops"] / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60, help="epochs of each training")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")
    pixels, labels = (array[: 28 * BATCH] for array in load_digits(return_X_y=True))
    turned = [rotate(pixels.reshape(-1, 8, 8) / 16, angle, (1, 2), reshape=False, order=1) for angle in (-12, 0, 12)]
    views = np.stack(turned).reshape(3, -1, 64).astype(np.float32)
    params = {name: jax.jit(net.init)(KEY, np.ones((1, INPUTS[name]))) for name, net in NETS.items()}
    of_vae = lambda epoch, chosen: (views[epoch % 3, chosen], labels[chosen])
    params, *_ = train(params, training(loss_of_vae, ADAM, "denoiser"), of_vae, len(labels), args.epochs)

    with tempfile.TemporaryDirectory() as directory:
        batches, example = [[*part] for part in np.split(views, 28, axis=1)], (labels[:BATCH], KEY)
        once, stored = store(directory, loss, params, batches, *example)
        print(once.explain(params, batches[0][0], *example), stored, sep="\n")
        image = jax.ShapeDtypeStruct((BATCH, 64), jnp.float32)  # not read
        after = lambda params, stored, *others: once.after(params, stored, image, *others)
        of_views = lambda epoch, chosen: (views[stored.epoch(epoch).drawn(chosen), chosen], labels[chosen])
        of_stored = lambda epoch, chosen: (stored.epoch(epoch)[chosen], labels[chosen])
        needed = once.needed(params, image, *example)
        in_each_step = train(params, training(loss, ADAM), of_views, len(labels), args.epochs)
        on_features = train(needed, training(after, ADAM), of_stored, len(labels), args.epochs)

    trained, losses, mflop = zip(in_each_step, on_features, strict=True)
    print(f"a step: {mflop[0]:.0f} MFLOP with the encoder, {mflop[1]:.0f} MFLOP with the stored mean and spread")
    print(f"the {len(losses[0])} losses differ by at most {abs(losses[0] - losses[1]).max():.0e}")
    trained = fz.combine(fz.partition(trained[1], FROZEN)[0], fz.partition(params, FROZEN)[1])
    asked, x = np.arange(200) % 10, jax.random.normal(KEY, (200, LATENT))
    x = jax.lax.fori_loop(0, 30, lambda i, x: x + velocity(trained, x, i / 30, asked) / 30, x)
    generated = apply("decoder", trained, x)
    seen = KNeighborsClassifier().fit(views.reshape(-1, 64), np.tile(labels, 3)).predict(generated)
    print(f"{np.mean(seen == asked):.0%} of {len(asked)} generated digits are recognized as intended")


if __name__ == "__main__":
    main()
