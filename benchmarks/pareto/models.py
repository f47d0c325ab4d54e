"""Three small models as plain functions of their parameters: a GPT, an LSTM, ResNet-20.

Each has `init(key) -> params` and `logits(params, x)`.
"""

from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


def normal(key: jax.Array, *shape: int, scale: float) -> jax.Array:
    return scale * jax.random.normal(key, shape)


def gpt_init(key: jax.Array, *, tokens: int, context: int, width: int, depth: int) -> Params:
    """A pre-norm decoder with learned positions; GPT-2's scales."""
    keys = iter(jax.random.split(key, 3 + 4 * depth))
    small, residual = 0.02, 0.02 / (2 * depth) ** 0.5

    def block() -> Params:
        return {
            "norm1": jnp.ones(width),
            "qkv": normal(next(keys), width, 3 * width, scale=small),
            "out": normal(next(keys), width, width, scale=residual),
            "norm2": jnp.ones(width),
            "expand": normal(next(keys), width, 4 * width, scale=small),
            "contract": normal(next(keys), 4 * width, width, scale=residual),
        }

    return {
        "embed": normal(next(keys), tokens, width, scale=small),
        "position": normal(next(keys), context, width, scale=small),
        "head": normal(next(keys), width, tokens, scale=small),
        "norm": jnp.ones(width),
        "blocks": [block() for _ in range(depth)],
    }


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return scale * x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def gpt_logits(params: Params, x: jax.Array, heads: int = 4) -> jax.Array:
    """int32 `[batch, time]` to float32 `[batch, time, tokens]`.

    Batch and time are one axis outside of attention, for which XLA is faster on CPU.
    """
    batch, time = x.shape
    h = (params["embed"][x] + params["position"][:time]).reshape(batch * time, -1)
    for block in params["blocks"]:
        qkv = layer_norm(h, block["norm1"]) @ block["qkv"]
        parts = jnp.moveaxis(qkv.reshape(batch, time, 3, heads, -1), (2, 3), (0, 2))
        h += causal_attention(*parts).swapaxes(1, 2).reshape(batch * time, -1) @ block["out"]
        hidden = jax.nn.gelu(layer_norm(h, block["norm2"]) @ block["expand"])
        h += hidden @ block["contract"]
    logits = layer_norm(h, params["norm"]) @ params["head"]
    return logits.reshape(batch, time, -1)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Of `[batch, heads, time, channels]`; no position looks at later ones."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tri(q.shape[2], dtype=bool), scores, -1e30)
    return jax.nn.softmax(scores) @ v


def lstm_init(key: jax.Array, *, tokens: int, width: int) -> Params:
    """Embedding, one LSTM layer, and a linear layer after it."""
    embed, cell, head = jax.random.split(key, 3)
    scale = width**-0.5
    return {
        "embed": normal(embed, tokens, width, scale=scale),
        "cell": normal(cell, 2 * width, 4 * width, scale=scale / 2**0.5),
        "bias": jnp.zeros(4 * width).at[width : 2 * width].set(1.0),  # the forget gate's
        "head": normal(head, width, tokens, scale=scale),
    }


def lstm_logits(params: Params, x: jax.Array) -> jax.Array:
    """int32 `[batch, time]` to float32 `[batch, time, tokens]`."""

    def step(carry: tuple[jax.Array, jax.Array], e: jax.Array) -> Any:
        h, c = carry
        gates = jnp.concatenate([e, h], -1) @ params["cell"] + params["bias"]
        i, f, o, g = jnp.split(gates, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    e = jnp.moveaxis(params["embed"][x], 1, 0)
    start = jnp.zeros_like(e[0])  # of the type of e, which varies over devices
    _, h = jax.lax.scan(step, (start, start), e)
    return jnp.moveaxis(h, 0, 1) @ params["head"]


def resnet20_init(key: jax.Array, *, classes: int = 10, width: int = 16) -> Params:
    """Three stages of three blocks (He et al., arXiv:1512.03385), with group norm."""
    keys = iter(jax.random.split(key, 32))

    def conv(size: int, inputs: int, outputs: int) -> jax.Array:
        scale = (2 / (size * size * inputs)) ** 0.5
        return normal(next(keys), size, size, inputs, outputs, scale=scale)

    blocks, inputs = [], width
    for stage in range(3):
        for _ in range(3):
            outputs = width * 2**stage
            block = {"first": conv(3, inputs, outputs), "second": conv(3, outputs, outputs)}
            block |= {"scale1": jnp.ones(outputs), "scale2": jnp.ones(outputs)}
            block |= {"shift1": jnp.zeros(outputs), "shift2": jnp.zeros(outputs)}
            if inputs != outputs:
                block["shortcut"] = conv(1, inputs, outputs)
            blocks.append(block)
            inputs = outputs
    head = {"kernel": normal(next(keys), inputs, classes, scale=inputs**-0.5)}
    norm = {"scale": jnp.ones(width), "shift": jnp.zeros(width)}
    return {"stem": conv(3, 3, width), "norm": norm, "blocks": blocks, "head": head}


def resnet20_logits(params: Params, x: jax.Array) -> jax.Array:
    """float32 `[batch, 32, 32, 3]` to float32 `[batch, classes]`."""

    def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        axes = ("NHWC", "HWIO", "NHWC")
        strides = (stride, stride)
        return jax.lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=axes)

    def norm(x: jax.Array, scale: jax.Array, shift: jax.Array, groups: int = 8) -> jax.Array:
        parts = x.reshape(*x.shape[:3], groups, -1)
        mean = parts.mean((1, 2, 4), keepdims=True)
        variance = jnp.square(parts - mean).mean((1, 2, 4), keepdims=True)
        parts = (parts - mean) * jax.lax.rsqrt(variance + 1e-5)
        return parts.reshape(x.shape) * scale + shift

    x = jax.nn.relu(norm(conv(x, params["stem"]), **params["norm"]))
    for block in params["blocks"]:
        stride = 2 if "shortcut" in block else 1
        y = conv(x, block["first"], stride)
        y = jax.nn.relu(norm(y, block["scale1"], block["shift1"]))
        y = norm(conv(y, block["second"]), block["scale2"], block["shift2"])
        x = conv(x, block["shortcut"], stride) if "shortcut" in block else x
        x = jax.nn.relu(x + y)
    return x.mean((1, 2)) @ params["head"]["kernel"]
