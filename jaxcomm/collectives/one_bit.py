"""The mean over devices in one bit a value on both hops, with the errors of both fed back."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._axes import AxisName
from jaxcomm.codecs import sign
from jaxcomm.collectives._sending import all_gather, all_to_all
from jaxcomm.collectives.algorithms._algorithm import cut, join
from jaxcomm.kernels._implementations import Option


def chunk_length(n: int, world: int) -> int:
    """The number of values that a device owns of a vector of n, ceil(n / world)."""
    return -(-n // world)


def one_bit_mean(
    x: jax.Array,
    worker_error: jax.Array,
    server_error: jax.Array,
    axis_name: AxisName,
    *,
    implementation: Option = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Averages one vector over a mesh axis in signs and scales, in the manual view.

    Every device adds its worker error to its vector, cuts the sum into N chunks and sends the
    signs and the scale of chunk j to device j, its owner. The owner averages the N decoded
    messages, adds its server error, and sends the signs and the scale of that to all devices. On
    both hops the next error is what encoding lost: sent + next error = vector + previous error.

    Padding, at the end of the last chunks, changes no scale and leaves no error.

    Args:
      x: float32[n], another on every device, in a region that is manual over every axis and
        where the checks of `jax.shard_map` are off.
      worker_error: float32[n], this device's.
      server_error: float32[ceil(n/N)], of the chunk that this device owns.
      axis_name: the mesh axis.
      implementation: of `sign.encode_with_feedback`; None is "xla".

    Returns:
      The mean, float32[n] and bitwise equal on all devices, and the next two errors.

    Wire: 2(N-1) messages of 1 + ceil(ceil(n/N) / 32) uint32 words, in one all-to-all and one
    all-gather: 2(N-1)/N bits a value, scales and padding aside.

    References:
      H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
      Convergence Speed", ICML 2021, arXiv:2102.02888, algorithm 1.

    Differs from the paper: a worker has a scale for each chunk, not one for its whole vector.
    """
    world, n = jax.lax.axis_size(axis_name), x.size
    width = chunk_length(n, world)
    counts = jnp.asarray(np.clip(n - width * np.arange(world), 0, width), jnp.int32)

    with jax.named_scope("encode"):
        message, worker_error = sign.encode_with_feedback(
            cut(x, world), cut(worker_error, world), counts, implementation=implementation
        )

    arrived = all_to_all(message, axis_name)
    count = counts[jax.lax.axis_index(axis_name)]
    padding = jnp.arange(width, dtype=jnp.int32) >= count
    average = jnp.sum(sign.decode(arrived, width), axis=0) / world
    with jax.named_scope("encode"):
        answer, server_error = sign.encode_with_feedback(
            jnp.where(padding, 0.0, average),
            jnp.where(padding, 0.0, server_error),
            count,
            implementation=implementation,
        )

    answers = all_gather(answer, axis_name)
    return join(sign.decode(answers, width), n), join(worker_error, n), server_error
