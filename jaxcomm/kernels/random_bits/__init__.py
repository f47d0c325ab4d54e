"""Random bits for rounding: a block cipher of a counter, so each word depends on its index alone.

The cipher is Threefry-2x32 with 13 rounds, the fewest that pass the Crush batteries of statistical
tests. `jax.random.bits` uses 20 rounds and a loop that XLA does not fuse. Here the cipher is a
straight line of additions, shifts and exclusive ors of words. XLA fuses it with the operation that
uses the bits, so they cost no pass over memory, and every platform computes the same values.

There is only a plain version.

References:
  John K. Salmon, Mark A. Moraes, Ron O. Dror and David E. Shaw, "Parallel Random Numbers: As Easy
  as 1, 2, 3", SC 2011.
"""

import math

import jax
import jax.numpy as jnp

from jaxcomm._numbers import is_integer

ROUNDS = 13
HALF = 2**31  # the word that rounds to nearest, instead of a random one

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA
# Fractions of the golden ratio and of the square root of 3: multiples of them are far apart.
_APART = (0x9E3779B9, 0xBB67AE85)


def seeded_key(seed: jax.typing.ArrayLike) -> jax.Array:
    """The key of a seed, from the same generator whatever `jax_default_prng_impl` is.

    Other keys are derived from it by folding in small numbers one after another. The `fold_in` of
    "unsafe_rbg" is commutative: step 1 of layer 2 would get the key of step 2 of layer 1.

    All 64 bits of a Python integer count, of which jax drops half where `jax_enable_x64` is off.
    """
    if is_integer(seed):
        words = [(int(seed) >> shift) & 0xFFFFFFFF for shift in (32, 0)]
        return jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl="threefry2x32")
    return jax.random.key(seed, impl="threefry2x32")


def random_bits(key: jax.Array, shape: tuple[int, ...], first_row: int = 0) -> jax.Array:
    """Draws 32 independent fair coins for every element.

    The word at index i of row r is the cipher of (i, r), where rows are counted through all leading
    axes. A longer last axis therefore leaves the earlier words of a row unchanged, and arrays with
    other rows may share a key.

    Args:
      key: a PRNG key, of any of jax's generators.
      shape: the shape of the result; the last axis and the number of rows are below 2^32.
      first_row: the number of the first row.

    Returns:
      uint32 array of that shape.
    """
    own = key_words(key)
    *lead, n = shape
    rows = jnp.arange(first_row, first_row + math.prod(lead), dtype=jnp.uint32).reshape(*lead, 1)
    columns = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return threefry2x32((own[0], own[1]), (columns, jnp.broadcast_to(rows, shape)))[0]


def rounding_words(key: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """The words that values of a shape are rounded with: `random_bits`, or HALF without a key."""
    return jnp.uint32(HALF) if key is None else random_bits(key, shape)


def key_words(key: jax.Array) -> jax.Array:
    """The key of the cipher, uint32 `(2,)`: that of `jax.random`, or drawn from a longer one.

    The words are not those that `jax.random` makes of the same key, with more rounds.
    """
    if jax.random.key_impl(key) == "threefry2x32":
        return jax.random.key_data(key)
    return jax.random.bits(key, (2,), jnp.uint32)


def own_key(key: jax.Array, first: int | jax.Array, second: int = 0) -> jax.Array:
    """A key for each pair of numbers below 2^32, at the cost of two additions.

    The cipher needs no random keys: consecutive ones give independent words. The numbers are spread
    so that sums of key and counter are equal only for words that are far apart, and even these are
    independent. `jax.random.fold_in` runs a cipher for each number. XLA on a GPU does that in
    kernels for one element, and takes a second to compile those of each bucket.

    Args:
      key: a PRNG key, of any of jax's generators.
      first: such as a device.
      second: such as a message.

    Returns:
      The key, of the generator of `seeded_key`.
    """
    numbers = jnp.stack([jnp.asarray(number, jnp.uint32) for number in (first, second)])
    moved = numbers * jnp.asarray(_APART, jnp.uint32)
    return jax.random.wrap_key_data(key_words(key) + moved, impl="threefry2x32")


def threefry2x32(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array], rounds: int = ROUNDS
) -> tuple[jax.Array, jax.Array]:
    """The Threefry-2x32 cipher of Salmon et al., section 4.2, word by word.

    Args:
      key: two uint32 scalars.
      counter: two uint32 arrays of one shape.
      rounds: how often the words are mixed.

    Returns:
      Two uint32 arrays of the counter's shape.
    """
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for i in range(rounds):
        x = x + y
        y = _rotate(y, _ROTATIONS[i % 8]) ^ x
        if i % 4 == 3:
            s = i // 4 + 1
            x = x + keys[s % 3]
            y = y + keys[(s + 1) % 3] + jnp.uint32(s)
    return x, y


def _rotate(x: jax.Array, by: int) -> jax.Array:
    return (x << by) | (x >> (32 - by))
