"""Rounding to nearest or at random, and the checks of the codecs' arguments."""

from collections.abc import Collection
from typing import Any

import jax

from jaxcomm._numbers import is_integer
from jaxcomm.codecs._codec import Codec

ROUNDINGS = ("nearest", "random")


def rounding_key(codec: Codec, key: jax.Array | None) -> jax.Array | None:
    """The key if the codec rounds at random, else None.

    Raises:
      ValueError: if the codec is random and there is no key.
    """
    if not codec.is_random:
        return None
    if key is None:
        raise ValueError(
            f"{codec.name} rounds at random and needs a key, got None; "
            "write encode(x, key) with key = jax.random.key(seed), a new one in every step."
        )
    return key


def require_integer(name: str, value: Any, lowest: int, highest: int | None = None) -> None:
    """Raises if a factory's argument is not an integer in its range."""
    wanted = f"an integer of at least {lowest}"
    if highest is not None:
        wanted = f"an integer from {lowest} to {highest}"
    if not is_integer(value):
        raise TypeError(f"{name} must be {wanted}, got {value!r}.")
    if value < lowest or (highest is not None and value > highest):
        raise ValueError(f"{name} must be {wanted}, got {value}.")


def require_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Raises a ValueError if a factory's argument is not one of its choices."""
    if value not in choices:
        quoted = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be {quoted}, got {value!r}.")
