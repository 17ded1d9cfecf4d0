"""Image classifiers, and functions written by hand that train their last layers on stored features."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

SIDE, PATCH, CLASSES = 224, 16, 100
WIDTH, HEADS, BLOCKS = 192, 3, 12

Features = Callable[[Any, jax.Array], jax.Array]
"""A function of the parameters and the images."""

Logits = Callable[[Any, jax.Array], jax.Array]
"""A function of the trainable parameters (a flat dictionary of nested ones) and the features."""


class ByHand(NamedTuple):
    """A model cut in two by hand: paths of its trainable parameters, its features, and logits of the features."""

    trains: tuple[tuple[str, ...], ...]
    features: Features
    logits: Logits

    @property
    def paths(self) -> list[str]:
        return ["/".join(path) for path in self.trains]

    def trainable(self, params: Any) -> Any:
        """The trainable parameters, each under the last name of its path."""
        found = {}
        for path in self.trains:
            found[path[-1]] = params
            for name in path:
                found[path[-1]] = found[path[-1]][name]
        return found


class Classifier(NamedTuple):
    """An unchanged model (parameters, and logits of parameters and images), and the same model cut by hand."""

    name: str
    params: Any
    logits: Callable[[Any, jax.Array], jax.Array]
    by_hand: Mapping[str, ByHand]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Block(nn.Module):
    """A pre-norm block."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class ViT(nn.Module):
    """ViT-tiny, which normalizes all tokens and classifies the first."""

    @nn.compact
    def __call__(self, images: jax.Array, until: str = "") -> jax.Array:
        """Logits, or the features before the layer ``until``."""
        x = nn.Conv(WIDTH, (PATCH, PATCH), strides=(PATCH, PATCH), name="patches")(images)
        x = x.reshape(len(x), -1, WIDTH)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for i in range(BLOCKS):
            if until == f"block_{i:02d}":
                return x
            x = Block(name=f"block_{i:02d}")(x)
        if until == "norm":
            return x[:, 0]
        x = nn.LayerNorm(name="norm")(x)[:, 0]
        return x if until == "head" else nn.Dense(CLASSES, name="head")(x)


def vit() -> Classifier:
    """ViT-tiny in Flax Linen, written here."""
    model, last = ViT(), f"block_{BLOCKS - 1:02d}"
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, SIDE, SIDE, 3)))["params"]

    def until(name: str) -> Features:
        return lambda params, images: model.apply({"params": params}, images, name)  # type: ignore[return-value]

    def head(p: Any, x: jax.Array) -> jax.Array:
        return nn.Dense(CLASSES).apply({"params": p["head"]}, x)  # type: ignore[return-value]

    def norm_and_head(p: Any, x: jax.Array) -> jax.Array:
        return head(p, nn.LayerNorm().apply({"params": p["norm"]}, x))  # type: ignore[arg-type]

    def block_and_head(p: Any, x: jax.Array) -> jax.Array:
        return norm_and_head(p, Block().apply({"params": p[last]}, x)[:, 0])  # type: ignore[index]

    return Classifier(
        "ViT-tiny, Flax Linen",
        params,
        until(""),
        {
            "head": ByHand((("head",),), until("head"), head),
            "norm, head": ByHand((("norm",), ("head",)), until("norm"), norm_and_head),
            "last block, norm, head": ByHand(((last,), ("norm",), ("head",)), until(last), block_and_head),
        },
    )


def resnet() -> Classifier:
    """Haiku's ResNet-18, with stored batch statistics."""
    import haiku as hk

    name, last = "res_net18/~/logits", "res_net18/~/block_group_3/~/block_1/~/"

    def transformed(call: Callable[..., jax.Array]) -> Any:
        def of_net(x: jax.Array) -> jax.Array:
            return call(hk.nets.ResNet18(CLASSES, logits_config={"w_init": hk.initializers.RandomNormal(0.05)}), x)

        return hk.without_apply_rng(hk.transform_with_state(of_net))

    images = jnp.zeros((1, SIDE, SIDE, 3))
    init = transformed(lambda net, x: net(x, is_training=True)).init
    params, stats = jax.jit(init)(jax.random.key(0), images)

    def applied(call: Callable[..., jax.Array]) -> Callable[[Any, jax.Array], jax.Array]:
        return lambda params, x: transformed(call).apply(params, stats, x)[0]

    def before_last_block(net: Any, images: jax.Array) -> jax.Array:
        x = jax.nn.relu(net.initial_batchnorm(net.initial_conv(images), False, False))
        x = hk.max_pool(x, window_shape=(1, 3, 3, 1), strides=(1, 2, 2, 1), padding="SAME")
        for group in net.block_groups[:-1]:
            x = group(x, False, False)
        return net.block_groups[-1].blocks[0](x, False, False)

    def last_block(net: Any, x: jax.Array) -> jax.Array:
        return net.block_groups[-1].blocks[1](x, False, False).mean((1, 2))

    of_block = tuple((path,) for path in params if path.startswith(last))
    return Classifier(
        "ResNet-18, Haiku",
        params,
        applied(lambda net, x: net(x, is_training=False)),
        {
            "head": ByHand(
                ((name,),),
                applied(lambda net, x: last_block(net, before_last_block(net, x))),
                applied(lambda net, x: net.logits(x)),
            ),
            "last block, head": ByHand(
                (*of_block, (name,)),
                applied(before_last_block),
                applied(lambda net, x: net.logits(last_block(net, x))),
            ),
        },
    )
