"""Decoders and encoders of text: new rows of embeddings, late layers of stacks, experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_freeze as fz
from gallery.gallery import Model, case, of_equinox

WIDTH, VOCABULARY, NEW = 128, 1024, 16
OLD = slice(0, VOCABULARY - NEW)
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 32))
SIZES = {"hidden_size": WIDTH, "intermediate_size": 256, "num_attention_heads": 4, "max_position_embeddings": 64}


def next_token(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1].astype(jnp.float32), tokens[:, 1:]).mean()


def of_transformers(flax_class, config, spec, decoder=False):
    """A model of transformers, with parameters of its own initialization."""
    model = flax_class(config, seed=0, input_shape=(1, 8))

    def loss(params, tokens):
        inputs = {"decoder_input_ids": tokens} if decoder else {}
        return next_token(model(tokens, params=params, train=False, **inputs).logits, tokens)

    return Model(model.params, loss, jnp.asarray(TOKENS), spec)


@case("GPT-2", "transformers flax", "decoder", "old tokens (tied head) and positions, the first block")
def gpt2():
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=WIDTH, n_layer=2, n_head=4)
    spec = fz.rules({"**/wte": fz.rows(OLD), "**/wpe": fz.rows(slice(0, 16)), "**/h/0": True, "**": False})
    return of_transformers(FlaxGPT2LMHeadModel, config, spec)


@case("Llama", "transformers flax", "decoder", "old tokens, their columns of the head, the first block")
def llama():
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, num_key_value_heads=2, **SIZES)
    rows = {"**/embed_tokens": fz.rows(OLD), "lm_head": fz.rows(OLD, axis=1)}
    return of_transformers(FlaxLlamaForCausalLM, config, fz.rules({**rows, "**/layers/0": True, "**": False}))


# Before the models of Gemma, which replaces a method of flax.linen.Module for good.
@case(
    "MaxText-like Llama", "transformers flax", "scanned decoder", "3 of 4 layers, stacked along axis 1; the embedding"
)
def maxtext_like():
    """The layers of transformers' Llama, stacked along axis 1 as in MaxText, scanned and rematerialized."""
    from flax import linen as nn
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_flax_llama import FlaxLlamaDecoderLayer, FlaxLlamaRMSNorm

    config = LlamaConfig(num_key_value_heads=2, **SIZES)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            return nn.remat(FlaxLlamaDecoderLayer)(config)(x, mask, jnp.arange(x.shape[1])[None])[0], None

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(VOCABULARY, WIDTH, name="embed")
            scanned = nn.scan(
                Layer, variable_axes={"params": 1}, split_rngs={"params": True}, length=4, in_axes=nn.broadcast
            )
            x, _ = scanned(name="layers")(embed(tokens), jnp.ones_like(tokens))
            return embed.attend(FlaxLlamaRMSNorm(config, name="norm")(x))

    return of_linen(Decoder(), fz.rules({"embed": True, "layers": fz.rows(slice(0, 3), axis=1), "**": False}))


@case("BERT", "transformers flax", "encoder", "old tokens (tied head), their output biases, old positions, a block")
def bert():
    from transformers import BertConfig, FlaxBertForMaskedLM

    config = BertConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **SIZES)
    rows = {"**/word_embeddings": fz.rows(OLD), "cls/predictions/bias": fz.rows(OLD)}
    spec = fz.rules({**rows, "**/position_embeddings": fz.rows(slice(0, 16)), "**/layer/0": True, "**": False})
    return of_transformers(FlaxBertForMaskedLM, config, spec)


@case("BART", "transformers flax", "encoder-decoder", "old tokens (tied head), old positions, the encoder")
def bart():
    from transformers import BartConfig, FlaxBartForConditionalGeneration

    sizes = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
    sizes |= {"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 2}
    config = BartConfig(max_position_embeddings=64, **sizes)
    rows = {"model/shared": fz.rows(OLD), "model/decoder/embed_positions": fz.rows(slice(0, 16))}
    spec = fz.rules({**rows, "final_logits_bias": True, "model/encoder": True, "**": False})
    return of_transformers(FlaxBartForConditionalGeneration, config, spec, decoder=True)


def of_linen(model, spec, logits=lambda out: out):
    params = jax.jit(model.init)(jax.random.key(0), jnp.asarray(TOKENS))["params"]

    def loss(params, tokens):
        return next_token(logits(model.apply({"params": params}, tokens)), tokens)

    return Model(params, loss, jnp.asarray(TOKENS), spec)


def of_gemma(flax_class, spec, **config):
    """A model of Gemma, smaller."""
    sizes = {"num_embed": VOCABULARY, "embed_dim": WIDTH, "hidden_dim": 256, "num_heads": 4, "head_dim": 32}
    types = flax_class.config.attention_types[4:6]
    config = dataclasses.replace(flax_class.config, **sizes, num_kv_heads=1, attention_types=types, **config)
    model = flax_class(config=config, dtype=jnp.float32, tokens="tokens")
    return of_linen(model, spec, lambda out: out.logits)


@case("Gemma 3", "gemma", "decoder", "old tokens (tied head), the first block")
def gemma3():
    from gemma import gm

    spec = fz.rules({"embedder/input_embedding": fz.rows(OLD), "layer_0": True, "**": False})
    return of_gemma(gm.nn.Gemma3_270M, spec)


@case("Gemma 4 MoE", "gemma", "MoE", "old tokens (tied head), 6 of 8 experts, the first block")
def gemma4_moe():
    from gemma import gm

    experts = fz.rows(slice(0, 6))
    moe = {"layer_1/mlp/linear": experts, "layer_1/mlp/gating_einsum": experts, "layer_1/mlp/per_expert_scale": experts}
    spec = fz.rules({"embedder/input_embedding": fz.rows(OLD), **moe, "layer_0": True, "**": False})
    sizes = {"num_experts": 8, "expert_dim": 64, "top_k_experts": 2, "moe_dense_hidden_dim": 64}
    return of_gemma(gm.nn.Gemma4_26B_A4B, spec, num_global_kv_heads=1, global_key_size=32, **sizes)


@case("Qwen3 MoE", "tunix", "MoE", "old tokens (tied head), 6 of 8 experts, the first block")
def qwen3_moe():
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3

    sizes = {"num_layers": 2, "vocab_size": VOCABULARY, "embed_dim": WIDTH, "hidden_dim": 64, "num_heads": 4}
    sizes |= {"head_dim": 32, "num_kv_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    config = qwen3.ModelConfig(rope_theta=10000, norm_eps=1e-6, use_tied_embedding=True, **sizes)
    graph, state = nnx.split(qwen3.Qwen3(config, rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(state)

    def loss(params, tokens):
        model = nnx.merge(graph, params)
        length = tokens.shape[1]
        mask = jnp.tril(jnp.ones((1, length, length), bool))
        logits, _ = model(tokens, jnp.arange(length)[None], None, mask)
        return next_token(logits, tokens)

    experts = fz.rows(slice(0, 6))
    rows = {"embedder/input_embedding": fz.rows(OLD), "layers/1/mlp/*_proj": experts}
    return Model(params, loss, jnp.asarray(TOKENS), fz.rules({**rows, "layers/0": True, "**": False}))


@case("ESM-2", "esm2quinox", "scanned encoder", "3 of 4 layers, old tokens of the tied head")
def esm2():
    import esm2quinox

    def loss(model, tokens):
        return next_token(jax.vmap(model)(tokens).logits, tokens)

    model = esm2quinox.ESM2(4, WIDTH, 4, True, jax.random.key(0))
    spec = fz.rules({"layers": fz.rows(slice(0, 3)), "logit_head/linear2": fz.rows(slice(0, 24)), "**": False})
    return of_equinox(model, loss, jnp.asarray(TOKENS) % 24 + 4, spec)
