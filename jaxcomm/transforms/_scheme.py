"""How an exchange works, in a form that others can carry out: `jaxcomm.sharded` does."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxcomm import codecs
from jaxcomm._axes import AxisName
from jaxcomm.collectives import algorithms
from jaxcomm.collectives.algorithms import Algorithm
from jaxcomm.collectives.reductions import Reduction
from jaxcomm.transforms._options import Exempt


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Scheme:
    """A static description of an exchange.

    Attributes:
      axis_name: the mesh axis.
      reduction: what messages mean, without a key; None where nothing is exchanged, or it
        cannot be sharded.
      algorithm: who talks to whom.
      seed: the seed for random rounding and coins.
      bucket_bytes: the most float32 bytes that travel together.
      bucket_order: the order of leaves that the user gave; empty if none was given.
      signs: whether it is a vote. The updates of one without feedback are signs, also those of
        exempt leaves.
      frozen: whether the updates are zero.
      gather: the format in which shards are gathered.
      residual_dtype: in which residuals are kept.
    """

    axis_name: AxisName
    reduction: Reduction | None
    algorithm: Algorithm = dataclasses.field(default_factory=algorithms.direct)
    seed: int = 0
    bucket_bytes: int = 2**23
    bucket_order: tuple[str, ...] = ()
    signs: bool = False
    frozen: bool = False
    gather: codecs.Codec = dataclasses.field(default_factory=codecs.float32)
    residual_dtype: str = "float32"


class Exchange(optax.GradientTransformation):
    """A transformation that says how it exchanges.

    Attributes:
      scheme: how it exchanges.
      exempt: which leaves travel in float32.
    """

    scheme: Scheme
    exempt: Exempt


def exchange(
    init: Callable[..., Any], update: Callable[..., Any], scheme: Scheme, exempt: Exempt = ()
) -> Exchange:
    """The transformation of these functions, which says how it exchanges."""
    tx = Exchange(init, update)
    tx.scheme, tx.exempt = scheme, exempt
    return tx
