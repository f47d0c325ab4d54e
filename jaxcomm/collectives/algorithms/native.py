"""XLA's own all-reduce."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._axes import AxisName
from jaxcomm.collectives.algorithms._algorithm import Algorithm
from jaxcomm.collectives.algorithms.direct import Direct
from jaxcomm.collectives.reductions import Prepared, Reduction
from jaxcomm.kernels import _device


@dataclasses.dataclass(frozen=True)
class Native(Algorithm):
    """One `psum` in the dtype of the codec; how it travels is up to XLA and its backend.

    Wire: 2(N-1)/N of the vector where the backend uses a bandwidth-optimal algorithm. XLA's CPU
    backend promotes bfloat16 to float32, and so sends 4 bytes per value.
    """

    name = "native"

    def all_reduce(
        self, prepared: Prepared, axis_name: AxisName, reduction: Reduction
    ) -> tuple[Any, Any]:
        """See `Algorithm.all_reduce`; errors are zero, because only float32 may keep them here."""
        errors = jnp.zeros_like(prepared.vector) if reduction.keeps_errors else None
        with jax.named_scope("exchange"):
            return reduction.native(prepared, axis_name), errors

    def reduce_scatter(
        self, partial: Any, axis_name: AxisName, reduction: Reduction, devices_per_partial: int
    ) -> tuple[Any, Any]:
        """See `Algorithm.reduce_scatter`: one `psum_scatter`; between CPU processes as `direct`.

        Gloo's reduce-scatter gives up if a process is 30 s late, whatever timeouts are set, and was
        reported to return wrong sums: https://github.com/jax-ml/jax/issues/40830 and 40831.
        """
        if _device.is_between_cpu_processes():
            return Direct().reduce_scatter(partial, axis_name, reduction, devices_per_partial)
        errors = jnp.zeros_like(partial) if reduction.keeps_errors else None
        return reduction.native_reduce_scatter(partial, axis_name), errors


def native() -> Native:
    """XLA's own all-reduce, only for means.

    Returns:
      The algorithm: one `psum` in the dtype of the codec, which is float32, bfloat16 or float16.
      Error feedback needs float32 here, because what XLA rounds off is lost.

    Wire: 2(N-1)/N of the vector, if the backend sends as little as possible. XLA's CPU backend
    sends bfloat16 as float32. Between CPU processes, a reduce-scatter alone, such as that of
    sharded parameters, is that of `direct`: gloo's own fails if a process is 30 s late.
    """
    return Native()
