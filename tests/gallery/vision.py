"""Vision models: channels of convolutions, late layers of stacks, positions, classes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_freeze as fz
from gallery.gallery import Model, case, of_equinox

IMAGES = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)
LABELS = np.array([3, 19])
CLASSES = 20
BATCH = (IMAGES, LABELS)
OLD_CLASSES = slice(0, 16)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@case("big_vision-like ViT", "gemma", "scanned ViT", "3 of 4 layers, 48 of 64 positions, old classes, patches")
def scanned_vit():
    """The ViT block of big_vision, as Gemma has it, scanned and rematerialized as in big_vision."""
    from flax import linen as nn
    from gemma.gm.nn.vision._vision_utils import Encoder1DBlock

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.remat(Encoder1DBlock)(block_id=0, mlp_dim=256, num_heads=4)(x), None

    class ViT(nn.Module):
        @nn.compact
        def __call__(self, images):
            x = nn.Conv(128, (4, 4), strides=(4, 4), name="embedding")(images)
            x = x.reshape(len(x), -1, 128)
            x += self.param("pos_embedding", nn.initializers.normal(0.02), (1, *x.shape[1:]))
            scanned = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
            x, _ = scanned(name="layers")(x, None)
            return nn.Dense(CLASSES, name="head")(nn.LayerNorm(name="norm")(x).mean(1))

    model = ViT()
    params = jax.jit(model.init)(jax.random.key(0), IMAGES)["params"]

    def loss(params, batch):
        return cross_entropy(model.apply({"params": params}, batch[0]), batch[1])

    rows = {
        "layers": fz.rows(slice(0, 3)),
        "pos_embedding": fz.rows(slice(0, 48), axis=1),
        "head/kernel": fz.rows(OLD_CLASSES, axis=1),
        "head/bias": fz.rows(OLD_CLASSES),
    }
    return Model(params, loss, BATCH, fz.rules({**rows, "embedding": True, "**": False}))


@case("ViT", "transformers flax", "ViT", "half of the positions, old classes, a block")
def vit():
    from transformers import FlaxViTForImageClassification, ViTConfig

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    config = ViTConfig(image_size=32, patch_size=4, num_labels=CLASSES, **sizes)
    model = FlaxViTForImageClassification(config, seed=0, input_shape=(1, 32, 32, 3))

    def loss(params, batch):
        images = jnp.moveaxis(batch[0], -1, 1)
        return cross_entropy(model(images, params=params, train=False).logits, batch[1])

    rows = {
        "**/position_embeddings": fz.rows(slice(0, 33), axis=1),
        "classifier/kernel": fz.rows(OLD_CLASSES, axis=1),
        "classifier/bias": fz.rows(OLD_CLASSES),
    }
    return Model(model.params, loss, BATCH, fz.rules({**rows, "**/layer/0": True, "**": False}))


def of_keras(model, spec):
    params = {variable.path: variable.value for variable in model.trainable_variables}
    stats = [variable.value for variable in model.non_trainable_variables]
    paths = [variable.path for variable in model.trainable_variables]

    def loss(params, batch):
        logits, _ = model.stateless_call([params[path] for path in paths], stats, batch[0], training=False)
        return cross_entropy(logits, batch[1])

    return Model(params, loss, BATCH, spec)


@case("MobileNet", "keras", "convolutional", "channels of a late convolution, old classes, the first")
def keras_mobilenet():
    import keras

    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNet(
        input_shape=(32, 32, 3), alpha=0.25, weights=None, classes=CLASSES, classifier_activation=None, dropout=0.0
    )
    rows = {
        "conv_pw_13/kernel": fz.rows(slice(0, 192), axis=3),
        "conv_preds/kernel": fz.rows(OLD_CLASSES, axis=3),
        "conv_preds/bias": fz.rows(OLD_CLASSES),
    }
    return of_keras(model, fz.rules({**rows, "conv1/kernel": True, "**": False}))


@case("DenseNet", "keras", "convolutional", "channels in and out of the last block, old classes, the first block")
def keras_densenet():
    """Blocks concatenate what was before them: a kernel has rows for each of the inputs."""
    import keras
    from keras.src.applications.densenet import DenseNet

    keras.utils.set_random_seed(0)
    model = DenseNet([1, 1, 1, 2], input_shape=(32, 32, 3), weights=None, classes=CLASSES, classifier_activation=None)
    rows = {
        "conv5_block2_2_conv/kernel": fz.rows(slice(0, 24), axis=3),
        "conv5_block2_1_conv/kernel": fz.rows(slice(0, 48), axis=2),
        "predictions/kernel": fz.rows(OLD_CLASSES, axis=1),
        "predictions/bias": fz.rows(OLD_CLASSES),
    }
    return of_keras(model, fz.rules({**rows, "conv1_conv": True, "conv[23]_*": True, "**": False}))


@case("ResNet-18", "flaxmodels", "convolutional", "channels of the last convolution, old classes, six blocks")
def flax_resnet():
    import flaxmodels

    model = flaxmodels.ResNet18(output="logits", pretrained=None, num_classes=CLASSES)
    variables = jax.jit(model.init)(jax.random.key(0), IMAGES)

    def loss(params, batch):
        images, labels = batch
        return cross_entropy(model.apply({**variables, "params": params}, images, train=False), labels)

    rows = {
        "BasicBlock_7/Conv_1/kernel": fz.rows(slice(0, 384), axis=3),
        "Dense_0/kernel": fz.rows(OLD_CLASSES, axis=1),
    }
    frozen = {f"BasicBlock_{i}": True for i in range(6)}
    return Model(variables["params"], loss, BATCH, fz.rules({**rows, **frozen, "Conv_0": True, "**": False}))


@case("ResNet V2", "haiku", "convolutional", "channels of a late convolution, old classes, the first")
def haiku_resnet():
    import haiku as hk

    def forward(images, train):
        net = hk.nets.ResNet(
            (1, 1, 1, 1), CLASSES, bottleneck=False, channels_per_group=(16, 32, 64, 64), use_projection=(True,) * 4
        )
        return net(images, is_training=train)

    net = hk.without_apply_rng(hk.transform_with_state(forward))
    params, stats = jax.jit(net.init, static_argnums=2)(jax.random.key(0), IMAGES, True)

    def loss(params, batch):
        return cross_entropy(net.apply(params, stats, batch[0], False)[0], batch[1])

    rows = {
        "**/block_group_3/~/block_0/~/conv_1/w": fz.rows(slice(0, 48), axis=3),
        "**/logits/w": fz.rows(OLD_CLASSES, axis=1),
        "**/logits/b": fz.rows(OLD_CLASSES),
    }
    params = jax.tree.map(lambda x: x + 0.1, params)  # Haiku's logits begin as zeros
    return Model(params, loss, BATCH, fz.rules({**rows, "**/initial_conv": True, "**": False}))


@case("ConvNeXt", "equimo", "convolutional", "old classes, the first stage")
def convnext():
    from equimo.vision.models import convnext

    sizes = {"depths": [1, 1, 1, 1], "dims": [16, 32, 64, 64], "num_classes": CLASSES, "layer_scale_init_value": 0.1}
    model = convnext.ConvNeXt(3, **sizes, key=jax.random.key(0))

    def loss(model, batch):
        images = jnp.moveaxis(batch[0], -1, 1)
        logits = jax.vmap(lambda x: model(x, key=jax.random.key(0), inference=True))(images)
        return cross_entropy(logits, batch[1])

    rows = {"head/weight": fz.rows(OLD_CLASSES), "head/bias": fz.rows(OLD_CLASSES)}
    return of_equinox(model, loss, BATCH, fz.rules({**rows, "blocks/0": True, "**": False}))
