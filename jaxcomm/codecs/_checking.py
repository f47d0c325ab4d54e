"""Checks that a codec from outside jaxcomm meets the requirements of `Codec`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxcomm.codecs._codec import Codec

METHODS = ("encode", "decode", "message_bytes")
_SHAPE = (2, 33)  # two messages of a length that no block size divides


def check(codec: Codec) -> None:
    """Traces the codec, once for equal ones.

    Raises:
      TypeError: if it is not a frozen dataclass with a `name` and hashable fields, if it lacks a
        method, if its payload is not one array, or if it decodes to another shape or dtype than it
        encoded.
      ValueError: if the size of a payload is not what `message_bytes` says.
    """
    try:
        hash(codec)
    except TypeError as error:
        raise TypeError(
            f"the codec {type(codec).__name__} cannot be hashed ({error}): decorate its class with "
            "@dataclasses.dataclass(frozen=True), and keep tuples in place of arrays and lists."
        ) from error
    _check_once(codec)


@functools.cache
def _check_once(codec: Codec) -> None:
    who = type(codec).__name__
    if not isinstance(getattr(codec, "name", None), str):
        raise TypeError(f"the codec {who} needs a name: ClassVar[str] in its class.")
    try:
        dataclasses.replace(codec, implementation=codec.implementation)
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"the codec {who} must be a dataclass without an __init__ of its own: decorate its "
            "class with @dataclasses.dataclass(frozen=True)."
        ) from error
    lacking = [x for x in METHODS if getattr(type(codec), x) is getattr(Codec, x)]
    if lacking:
        raise TypeError(
            f"the codec {who} lacks {', '.join(lacking)}; a codec needs a name, "
            f"{', '.join(METHODS[:-1])} and {METHODS[-1]}."
        )
    key = jax.eval_shape(lambda: jax.random.key(0)) if codec.is_random else None
    payload = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct(_SHAPE, jnp.float32), key)
    messages, length = _SHAPE
    if not isinstance(payload, jax.ShapeDtypeStruct) or payload.shape[:-1] != (messages,):
        raise TypeError(
            f"encode of the codec {who} must return one array (..., m) for float32 (..., n), got "
            f"{payload} for {_SHAPE}."
        )
    sent = payload.size * payload.dtype.itemsize // messages
    if sent != codec.message_bytes(length):
        raise ValueError(
            f"message_bytes({length}) of the codec {who} is {codec.message_bytes(length)}, and its "
            f"payload has {sent} bytes."
        )
    decoded = jax.eval_shape(lambda p: codec.decode(p, length), payload)
    is_array = isinstance(decoded, jax.ShapeDtypeStruct)
    if not is_array or (decoded.shape, decoded.dtype) != (_SHAPE, jnp.float32):
        raise TypeError(
            f"decode of the codec {who} must return float32 {_SHAPE} here, got {decoded}."
        )
