"""What else blocks of integers are: on GPUs, of no messages, and of several."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import codec_oracles as expected
from jaxcomm import codecs
from jaxcomm.kernels._mosaic import rows_layout
from jaxcomm.kernels.block_quantization import integers, mosaic


def test_gpus_put_the_short_last_block_behind_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    x = np.random.default_rng(0).standard_normal((2, 75)).astype(np.float32)
    for codec, levels in ((codecs.int8(32), 127), (codecs.int4(32), 7)):
        found = codec.decode(codec.encode(jnp.asarray(x)), 75)
        for row, values in zip(x, found, strict=True):
            wanted = expected.blockwise(row, expected.HALF, 32, levels, "max")
            np.testing.assert_array_equal(values, wanted)


def test_a_sum_of_no_messages() -> None:
    with pytest.raises(ValueError, match=r"takes messages \(N, m\), got shape \(0, 8\)"):
        codecs.int8().decode_and_sum(jnp.zeros((0, 8), jnp.uint8), 4)


def test_vectors_begin_where_messages_do() -> None:
    for messages, vector in ((1, 4), (2, 1)):
        plan = mosaic._plan(messages, 3 * 36 + 5, integers.writing(127, 36))
        lanes = math.gcd(36 // vector, 32)
        assert plan.layout == rows_layout(lanes, vector)[1]
