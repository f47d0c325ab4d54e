"""The rows with Muon: for the matrices of a transformer's blocks; Adam for all other leaves."""

from collections.abc import Callable
from typing import Any

import jax
import optax

import jaxcomm
from benchmarks.pareto.methods import (
    Method,
    around,
    bfloat16,
    cnat,
    float32,
    int2,
    int4,
    low_rank,
    sign,
)

Exchange = Callable[[], optax.GradientTransformation]


def matrices(params: Any) -> Any:
    """Which leaves Muon makes orthogonal, as `optax.contrib.muon` asks it."""

    def of(path: Any, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        in_a_block = getattr(path[0], "key", None) == "blocks"
        return optax.contrib.MuonDimensionNumbers() if in_a_block and x.ndim == 2 else None

    return jax.tree_util.tree_map_with_path(of, params)


def muon(rate: Any) -> optax.GradientTransformation:
    """Muon with updates as large as Adam's, so that both have one rate."""
    return optax.contrib.muon(
        rate,
        consistent_rms=0.2,
        adam_b2=0.99,
        adam_learning_rate=rate,
        muon_weight_dimension_numbers=matrices,
    )


def int8() -> optax.GradientTransformation:
    """A mean in 8 bits."""
    return jaxcomm.mean("data", "int8")


def fp8() -> optax.GradientTransformation:
    """A mean in 8-bit floats, whose errors do not grow with the block's largest value."""
    return jaxcomm.mean("data", "fp8_e4m3")


def behind(exchange: Exchange) -> Method:
    """Muon behind an exchange."""

    def make(rate: optax.Schedule, steps: int) -> optax.GradientTransformation:
        del steps
        return optax.chain(exchange(), muon(rate))

    return Method("muon", make, around(1e-2))


def own(exchange: Exchange) -> Method:
    """Each device's own Muon; its step is exchanged, with the sign of a gradient."""

    def make(rate: optax.Schedule, steps: int) -> optax.GradientTransformation:
        del steps
        step = optax.chain(muon(1.0), optax.scale(-1.0))
        return optax.chain(
            jaxcomm.local("data", step), exchange(), optax.scale_by_learning_rate(rate)
        )

    return Method("local muon", make, around(2e-2))


def local_steps(every: int, exchange: Exchange) -> Method:
    """So many steps of each device's own Muon, then a mean of what they did."""

    def make(rate: optax.Schedule, steps: int) -> optax.GradientTransformation:
        del steps
        return jaxcomm.local_steps(muon(rate), every, optax.sgd(1.0), exchange())

    return Method("local muon", make, around(2e-2), lambda steps: 1 / every)


MUON: dict[str, Method] = {
    "Muon, float32": behind(float32),
    "local Muon, scaled_sign": own(sign),
    "local Muon, int4": own(int4),
    "4 local steps of Muon, scaled_sign": local_steps(4, sign),
    "Muon, int8": behind(int8),
    "Muon, fp8": behind(fp8),
    "Muon, int4, feedback": behind(int4),
    "Muon, cnat": behind(cnat),
    "Muon, bfloat16": behind(bfloat16),
    "Muon, scaled_sign, feedback": behind(sign),
    "local Muon, int2": own(int2),
    "Muon, int2, feedback": behind(int2),
    "Muon, PowerSGD, rank 4": behind(low_rank),
}
