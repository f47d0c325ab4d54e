"""The mean over devices in one bit per value on both hops, with the errors of both fed back."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._axes import AxisName
from jaxcomm.codecs import sign
from jaxcomm.collectives._sending import all_gather, all_to_all
from jaxcomm.collectives.algorithms._algorithm import cut, join
from jaxcomm.kernels.reductions import sum_in_order

BLOCK = sign.BLOCK


def chunk_length(n: int, world: int) -> int:
    """The number of values of a vector of n that a device owns: whole blocks."""
    return -(-n // (BLOCK * world)) * BLOCK


def one_bit_mean(
    x: jax.Array,
    worker_error: jax.Array,
    server_error: jax.Array,
    counts: np.ndarray,
    axis_name: AxisName,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Averages one vector over a mesh axis in signs and scales, in the manual view.

    Every device adds its worker error to its vector, cuts the sum into N chunks of blocks and sends
    the signs and scales of chunk j to device j, its owner. The owner averages the N decoded
    messages, adds its server error, and sends the signs and scales of the sum to all devices. On
    both hops the next error is what encoding lost: sent + next error = vector + previous error.

    Padding changes no scale and leaves no error.

    Args:
      x: float32[n], different on every device, in a region that is manual over every axis and where
        the checks of `jax.shard_map` are off; n is a multiple of BLOCK.
      worker_error: float32[n], this device's.
      server_error: float32[chunk_length(n, N)], of the chunk that this device owns.
      counts: int[n / BLOCK], the number of values in each block; after these, x has zeros.
      axis_name: the mesh axis.

    Returns:
      The mean, float32[n] and bitwise equal on all devices, and the next two errors. In the padding
      the mean is arbitrary.

    Wire: 2(N-1) messages of 33 uint32 words for each of ceil(n / BLOCK / N) blocks, in one
    all-to-all and one all-gather: 2(N-1)/N of 1.03 bits per value, padding aside.

    References:
      H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
      Convergence Speed", ICML 2021, arXiv:2102.02888, algorithm 1.

    Differs from the paper: a worker has a scale for each block, not one for its whole vector.
    """
    world, n = jax.lax.axis_size(axis_name), x.size
    blocks = chunk_length(n, world) // BLOCK
    padded = np.zeros(world * blocks, np.int32)
    padded[: counts.size] = counts
    of_chunks = jnp.asarray(padded.reshape(world, blocks))

    with jax.named_scope("encode"):
        message, worker_error = sign.encode_with_feedback(
            _cut(x, world), _cut(worker_error, world), of_chunks
        )

    arrived = all_to_all(message, axis_name)
    own = of_chunks[jax.lax.axis_index(axis_name)]
    average = sign.without_padding(sum_in_order(sign.decode(arrived)) / world, own)
    with jax.named_scope("encode"):
        answer, server_error = sign.encode_with_feedback(average, server_error, own)

    answers = all_gather(answer, axis_name)
    return join(sign.decode(answers), n), join(worker_error, n), server_error


def _cut(x: jax.Array, world: int) -> jax.Array:
    """The chunks of all owners, float32[N, chunk_length(n, N)]."""
    return cut(jnp.pad(x, (0, chunk_length(x.size, world) * world - x.size)), world)
