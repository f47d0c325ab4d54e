"""The mean over devices in one bit per value on both hops, with the errors of both fed back."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _axes, _hosts
from jaxcomm._axes import AxisName, Part
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

    Where hosts have D devices, as far as jax knows, these first add up their vectors and worker
    errors, in float32. Each stands for its host in the chunks of the devices of its place, which
    are on all hosts; its worker error is that of the host's sum in these, and zero elsewhere.

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
    all-to-all and one all-gather: 2(N-1)/N of 1.03 bits per value, padding aside. Between H hosts
    of D devices: 2(H-1) of these messages; within a host, an all-to-all of float32 and an
    all-gather of the answers.

    References:
      H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
      Convergence Speed", ICML 2021, arXiv:2102.02888, algorithm 1.

    Differs from the paper: a worker has a scale for each block, not one for its whole vector.
    """
    world, n = jax.lax.axis_size(axis_name), x.size
    between, within = _hosts.levels(axis_name)
    blocks = chunk_length(n, world) // BLOCK
    padded = np.zeros(world * blocks, np.int32)
    padded[: counts.size] = counts
    of_chunks = sent_counts = jnp.asarray(padded.reshape(world, blocks))
    vector, error = _cut(x, world), _cut(worker_error, world)
    if within is not None:
        vector = sum_in_order(all_to_all(_by_place(vector + error, within), within))
        error = jnp.zeros_like(vector)
        sent_counts = _by_place(of_chunks, within)[_axes.place_on(within)]

    with jax.named_scope("encode"):
        message, error = sign.encode_with_feedback(vector, error, sent_counts)

    arrived = all_to_all(message, between)
    own = of_chunks[jax.lax.axis_index(axis_name)]
    average = sign.without_padding(sum_in_order(sign.decode(arrived)) / world, own)
    with jax.named_scope("encode"):
        answer, server_error = sign.encode_with_feedback(average, server_error, own)

    answers = all_gather(answer, between)
    if within is not None:
        answers = _by_device(all_gather(answers, within))
        errors = jnp.zeros((within.size, *error.shape), jnp.float32)
        place = _axes.place_on(within)
        error = _by_device(jax.lax.dynamic_update_index_in_dim(errors, error, place, 0))
    return join(sign.decode(answers), n), join(error, n), server_error


def _by_place(chunks: jax.Array, within: Part) -> jax.Array:
    """What devices own, `(N, ...)`, by their places on their hosts: `(D, N/D, ...)`."""
    return chunks.reshape(-1, within.size, *chunks.shape[1:]).swapaxes(0, 1)


def _by_device(chunks: jax.Array) -> jax.Array:
    """The reverse."""
    return chunks.swapaxes(0, 1).reshape(-1, *chunks.shape[2:])


def _cut(x: jax.Array, world: int) -> jax.Array:
    """The chunks of all owners, float32[N, chunk_length(n, N)]."""
    return cut(jnp.pad(x, (0, chunk_length(x.size, world) * world - x.size)), world)
