"""Integers of kernels have 32 bits: where Python's have 64, and where 32 do not reach."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxcomm.kernels.block_quantization import fp8, integers
from jaxcomm.kernels.powers_of_two import nine_bits

N = 2**14 + 17
X = jax.ShapeDtypeStruct((4, N), jnp.float32)
PAYLOADS = jax.ShapeDtypeStruct((4, nine_bits.message_bytes(N)), jnp.uint8)
KEY = partial(jax.random.key, 0)
INT8, INT4 = integers.writing(127, 256), integers.writing(7, 64)
FP8 = fp8.writing(jnp.float8_e4m3fn, 256)
Case = tuple[str, Any, Callable[..., Any]]
CASES: dict[str, Case] = {
    "int8": ("block_quantization.mosaic.encode", X, lambda f, x: f(x, INT8, None)),
    "fp8": ("block_quantization.mosaic.encode", X, lambda f, x: f(x, FP8, None)),
    "int4, random": ("block_quantization.mosaic.encode", X, lambda f, x: f(x, INT4, KEY())),
    "window": ("powers_of_two.window_mosaic.encode", X, lambda f, x: f(x, None)),
    "window, random": ("powers_of_two.window_mosaic.encode", X, lambda f, x: f(x, KEY())),
    "nine bits": ("powers_of_two.mosaic.encode", X, lambda f, x: f(x, None)),
    "nine bits, random": ("powers_of_two.mosaic.encode", X, lambda f, x: f(x, KEY())),
    "their sum": ("powers_of_two.mosaic.decode_and_sum", PAYLOADS, lambda f, x: f(x, N)),
    "compact": ("select.triton.compact", X, lambda f, x: f(x[0], jnp.float32(1), 100)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernels_lower_and_their_results_keep_their_types(case: Case) -> None:
    path, x, call = case
    module, name = f"jaxcomm.kernels.{path}".rsplit(".", 1)
    step = partial(call, getattr(importlib.import_module(module), name))
    wanted = jax.eval_shape(step, x)
    with jax.enable_x64(True):
        lowered = jax.jit(step).trace(x).lower(lowering_platforms=("cuda",))
        assert jax.tree.map(lambda y: (y.shape, y.dtype), lowered.out_info) == jax.tree.map(
            lambda y: (y.shape, y.dtype), wanted
        )
    assert "custom_call" in lowered.as_text()


@pytest.mark.parametrize(
    ("path", "shape", "rest"),
    [
        ("powers_of_two", (2**19, 1), (None,)),  # int32 would not reach the padded messages
        ("powers_of_two", (2**12, 32), (None,)),
        ("block_quantization", (2**17, 256), (INT8, None)),
        ("block_quantization", (2**20, 256), (FP8, None)),
    ],
)
def test_many_short_messages_are_not_padded(path: str, shape: Any, rest: Any) -> None:
    module = importlib.import_module(f"jaxcomm.kernels.{path}.mosaic")
    with pytest.raises(NotImplementedError, match=r"would pad \d+ values .* to \d+, at most"):
        jax.eval_shape(lambda x: module.encode(x, *rest), jax.ShapeDtypeStruct(shape, jnp.float32))
