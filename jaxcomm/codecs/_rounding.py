"""What codecs that round in one of two ways have in common."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.codecs._codec import Codec
from jaxcomm.kernels.random_bits import random_bits

HALF = 2**31  # the word that rounds to nearest where a random one rounds at random

ROUNDINGS = ("nearest", "random")


def rounding_bits(codec: Codec, key: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """A uint32 word for every value if the codec is random, else the scalar HALF.

    Raises:
      ValueError: if the codec is random and there is no key.
    """
    if not codec.is_random:
        return jnp.uint32(HALF)
    return random_bits(require_key(codec, key), shape)


def require_key(codec: Codec, key: jax.Array | None) -> jax.Array:
    """The key; raises a ValueError if there is none."""
    if key is None:
        raise ValueError(
            f"{codec.name} rounds at random and needs a key, got None; "
            "write encode(x, key) with key = jax.random.key(seed), another one in every step."
        )
    return key


def require_integer(name: str, value: Any, lowest: int, highest: int | None = None) -> None:
    """Raises where a factory's argument is no integer, or outside of its range."""
    wanted = f"an integer of at least {lowest}"
    if highest is not None:
        wanted = f"an integer from {lowest} to {highest}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be {wanted}, got {value!r}.")
    if value < lowest or (highest is not None and value > highest):
        raise ValueError(f"{name} must be {wanted}, got {value}.")


def require_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Raises a ValueError where a factory's argument is none of its choices."""
    if value not in choices:
        quoted = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be {quoted}, got {value!r}.")
