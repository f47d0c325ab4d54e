"""A GPT-style transformer whose layers are scanned, as shapes: what is compiled and never run."""

from typing import Any

import jax
import jax.numpy as jnp

import jaxcomm

Params = dict[str, Any]


def shapes(layers: int, width: int, heads: int, vocabulary: int, context: int) -> Params:
    """The shapes of the parameters; those of the blocks have a leading axis of layers."""

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    head = (heads, width // heads)
    return {
        "embed": {"tokens": of(vocabulary, width), "positions": of(context, width)},
        "blocks": {
            "norm1": {"scale": of(layers, width)},
            "attention": {
                "query": of(layers, width, *head),
                "key": of(layers, width, *head),
                "value": of(layers, width, *head),
                "out": of(layers, *head, width),
            },
            "norm2": {"scale": of(layers, width)},
            "mlp": {
                "up": of(layers, width, 4 * width),
                "up_bias": of(layers, 4 * width),
                "down": of(layers, 4 * width, width),
                "down_bias": of(layers, width),
            },
        },
        "norm": {"scale": of(width)},
        "head": {"kernel": of(width, vocabulary)},
    }


def loss_fn(params: Params, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of the next tokens; int32 tokens of shape (rows, context + 1).

    With a mesh axis "fsdp", parameters are split over it: a layer is whole while it is used, and is
    computed twice, so that whole layers are not kept for the backward pass.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    outside = {name: part for name, part in params.items() if name != "blocks"}
    params = {**params, **jaxcomm.gather(outside, within="fsdp")}
    embed = params["embed"]
    x = (embed["tokens"][inputs] + embed["positions"][: inputs.shape[1]]).astype(jnp.bfloat16)

    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        layer = jaxcomm.gather(jaxcomm.exchanged(layer), within="fsdp")
        layer = jax.tree.map(lambda p: p.astype(jnp.bfloat16), layer)
        x = x + _attention(_norm(x, layer["norm1"]["scale"]), layer["attention"])
        return x + _mlp(_norm(x, layer["norm2"]["scale"]), layer["mlp"]), None

    recompute = "fsdp" in jax.sharding.get_abstract_mesh().axis_names
    x, _ = jax.lax.scan(jax.checkpoint(block) if recompute else block, x, params["blocks"])
    x = _norm(x, params["norm"]["scale"].astype(jnp.bfloat16))
    logits = (x @ params["head"]["kernel"].astype(jnp.bfloat16)).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype)) * scale


def _attention(x: jax.Array, p: Params) -> jax.Array:
    q, k, v = (jnp.einsum("bti,ihd->bthd", x, p[name]) for name in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return jnp.einsum("bthd,hdi->bti", mixed, p["out"])


def _mlp(x: jax.Array, p: Params) -> jax.Array:
    hidden = jax.nn.gelu(x @ p["up"] + p["up_bias"])
    return hidden @ p["down"] + p["down_bias"]
