"""A codec that a user writes: used as it is, or refused with what it lacks."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import codecs


@dataclasses.dataclass(frozen=True)
class Halves(codecs.Codec):
    """float16 of the values over a factor."""

    factor: float = 2.0
    name: ClassVar[str] = "halves"

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return (x / self.factor).astype(jnp.float16)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        return payload[..., :n].astype(jnp.float32) * self.factor

    def message_bytes(self, n: int) -> int:
        return 2 * n


class WithInit(Halves):
    def __init__(self, factor: float) -> None:
        object.__setattr__(self, "factor", factor)


class Nameless(codecs.Codec):
    encode, decode, message_bytes = Halves.encode, Halves.decode, Halves.message_bytes


class Pairs(Halves):
    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Any:
        return x, x


@dataclasses.dataclass(frozen=True)
class Unmeasured(codecs.Codec):
    name: ClassVar[str] = "unmeasured"
    encode, decode = Halves.encode, Halves.decode


class Longer(Halves):
    def message_bytes(self, n: int) -> int:
        return 4 * n


class Wider(Halves):
    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        return payload * jnp.float16(self.factor)


def test_it_is_used(mesh8: jax.sharding.Mesh) -> None:
    x = np.arange(8 * 5, dtype=np.float32).reshape(8, 5)
    f = jax.shard_map(
        lambda x: jaxcomm.pmean(x, "data", Halves(4.0), "ring"),
        mesh=mesh8,
        in_specs=jax.P("data"),
        out_specs=jax.P(),
    )
    np.testing.assert_array_equal(jax.jit(f)(x), x.mean(0, keepdims=True))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: WithInit(2.0), TypeError, "WithInit must be a dataclass without an __init__"),
        (Nameless, TypeError, "Nameless needs a name"),
        (Unmeasured, TypeError, "Unmeasured lacks message_bytes; a codec needs a name, encode, de"),
        (Pairs, TypeError, "encode of the codec Pairs must return one array"),
        (Longer, ValueError, r"message_bytes\(33\) of the codec Longer is 132, .* 66 bytes"),
        (Wider, TypeError, "decode of the codec Wider must return float32"),
    ],
)
def test_what_it_lacks_is_said(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jaxcomm.mean("data", make())


def test_a_codec_that_cannot_be_hashed() -> None:
    @dataclasses.dataclass(frozen=True)
    class Table(codecs.Codec):
        name: ClassVar[str] = "table"
        values: Any = None

    with pytest.raises(TypeError, match="the codec Table cannot be hashed .*keep tuples in place"):
        codecs.from_name(Table(np.zeros(3)))
