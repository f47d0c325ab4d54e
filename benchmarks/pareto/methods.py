"""The rows: each method with the optimizer that is recommended for it, and the rates to try.

A row enters with a factory in `ADAM` or `for_sgd`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import optax

import jaxcomm

SIGN128 = jaxcomm.codecs.scaled_sign(128)
Factory = Callable[[optax.Schedule, int], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Method:
    """One row.

    Attributes:
      optimizer: what follows the exchange, or contains it.
      make: from a schedule of the learning rate and the number of steps to a transformation.
      rates: the peaks of the learning rate to choose from.
      rare: the share of steps in which conditionals take the branch that sends most, from the
        number of steps.
    """

    optimizer: str
    make: Factory
    rates: tuple[float, ...]
    rare: Callable[[int], float] = lambda steps: 1.0

    def bytes_per_step(self, report: jaxcomm.WireReport, steps: int) -> float:
        """The mean over the run of what a device sends in a step."""
        share, most = self.rare(steps), report.bytes_max
        if not report.conditionals:
            return float(most)
        by_branch = report.by_branch()
        saved = 0.0
        for name, branches in report.conditionals:
            amounts = [by_branch[name, i].bytes_max for i in range(branches)]
            saved += float(max(amounts) - min(amounts))
        return float(most) - (1 - share) * saved


def around(rate: float) -> tuple[float, ...]:
    """Three rates, a factor of two apart."""
    return rate / 2, rate, 2 * rate


def adam(rate: optax.Schedule) -> optax.GradientTransformation:
    """Adam with decays for runs of some hundred steps."""
    return optax.adam(rate, b1=0.9, b2=0.99)


def nadam(rate: optax.Schedule) -> optax.GradientTransformation:
    """Adam with Nesterov's momentum."""
    return optax.adam(rate, b1=0.9, b2=0.99, nesterov=True)


def sgd(rate: optax.Schedule) -> optax.GradientTransformation:
    """SGD with momentum."""
    return optax.sgd(rate, momentum=0.9)


def nesterov(rate: optax.Schedule) -> optax.GradientTransformation:
    """SGD with Nesterov's momentum."""
    return optax.sgd(rate, momentum=0.9, nesterov=True)


def feedback(
    codec: str | jaxcomm.codecs.Codec, residual_dtype: str = "float32"
) -> optax.GradientTransformation:
    """A mean in few bits whose errors are fed back."""
    return jaxcomm.mean("data", codec, error_feedback=True, residual_dtype=residual_dtype)


def before(
    exchange: Callable[[], optax.GradientTransformation],
    optimizer: Callable[[optax.Schedule], optax.GradientTransformation],
) -> Factory:
    """An exchange in front of an optimizer."""
    return lambda rate, steps: optax.chain(exchange(), optimizer(rate))


def behind(
    own: optax.GradientTransformation, exchange: Callable[[], optax.GradientTransformation]
) -> Factory:
    """Each device's own optimizer; what it would do is exchanged."""
    return lambda rate, steps: optax.chain(
        jaxcomm.local("data", own), exchange(), optax.scale_by_learning_rate(rate)
    )


ADAM_STEP = optax.scale_by_adam(b1=0.9, b2=0.99)
NADAM_STEP = optax.scale_by_adam(b1=0.9, b2=0.99, nesterov=True)
NESTEROV_STEP = optax.trace(0.9, nesterov=True)


def signum(rate: optax.Schedule, steps: int) -> optax.GradientTransformation:
    """A vote on each device's momentum."""
    del steps
    momentum = jaxcomm.local("data", optax.ema(0.9))
    return optax.chain(momentum, jaxcomm.majority_vote("data"), optax.sgd(rate))


def one_bit_adam(rate: optax.Schedule, steps: int) -> optax.GradientTransformation:
    """Its default: 15 % of the steps are dense."""
    return jaxcomm.one_bit_adam("data", rate, b2=0.99, total_steps=steps)


def factored_adam(
    exchange: Callable[[], optax.GradientTransformation], nesterov: bool = False
) -> Factory:
    """A momentum that all devices share travels by this exchange."""
    return lambda rate, steps: jaxcomm.factored_adam(exchange(), rate, nesterov=nesterov)


def local_steps(
    every: int,
    exchange: Callable[[], optax.GradientTransformation],
    name: str = "local adam",
    inner: Callable[[optax.Schedule], optax.GradientTransformation] = adam,
    rate: float = 6e-3,
) -> Method:
    """Local SGD: so many steps of each device's own optimizer, then a mean of what they did."""

    def make(rate: optax.Schedule, steps: int) -> optax.GradientTransformation:
        del steps
        return jaxcomm.local_steps(inner(rate), every, optax.sgd(1.0), exchange())

    return Method(name, make, around(rate), lambda steps: 1 / every)


def outer_momentum(
    every: int, momentum: float, exchange: Callable[[], optax.GradientTransformation]
) -> Method:
    """Local steps with little momentum of their own; that of the outer optimizer is shared."""

    def make(rate: optax.Schedule, steps: int) -> optax.GradientTransformation:
        del steps
        outer = optax.sgd(1.0, momentum=momentum, nesterov=True)
        return jaxcomm.local_steps(optax.adam(rate, b1=0.5, b2=0.99), every, outer, exchange())

    return Method("local adam", make, around(4e-3), lambda steps: 1 / every)


def float32() -> optax.GradientTransformation:
    """The mean that all are compared with."""
    return jaxcomm.mean("data")


def bfloat16() -> optax.GradientTransformation:
    """A mean in 16 bits."""
    return jaxcomm.mean("data", "bfloat16")


def cnat() -> optax.GradientTransformation:
    """A mean in powers of two."""
    return jaxcomm.mean("data", "cnat")


def int4() -> optax.GradientTransformation:
    """A mean in 4.5 bits."""
    return feedback("int4")


def int2() -> optax.GradientTransformation:
    """A mean in 2.13 bits."""
    return feedback("int2")


def sign() -> optax.GradientTransformation:
    """A mean in 1.03 bits."""
    return feedback("scaled_sign")


def sign128() -> optax.GradientTransformation:
    """A mean in 1.25 bits."""
    return feedback(SIGN128)


def oktopk(residual_dtype: str = "float32") -> optax.GradientTransformation:
    """The largest 1 % of the values."""
    return jaxcomm.sparse_mean("data", 0.01, residual_dtype=residual_dtype)


def low_rank() -> optax.GradientTransformation:
    """PowerSGD of rank 4."""
    return jaxcomm.low_rank_mean("data", 4)


def decaying(density: float, decay: float) -> optax.GradientTransformation:
    """The largest values of a momentum that each device keeps for itself."""
    return jaxcomm.sparse_mean("data", density, "topk_allgather", residual_decay=decay)


def chunks(decay: float = 1.0) -> optax.GradientTransformation:
    """The largest thirty-second of each chunk, in two bits."""
    return jaxcomm.sparse_mean("data", 1 / 32, "topk_chunks", residual_decay=decay)


def demo(density: float, decay: float) -> Factory:
    """DeMo without its transform: the sign of what the largest values of the momenta add up to."""
    return lambda rate, steps: optax.chain(
        decaying(density, decay), optax.scale_by_sign(), optax.scale_by_learning_rate(rate)
    )


# The methods for Adam, on the transformers; those that are compared most come first.
ADAM: dict[str, Method] = {
    "float32": Method("adam", before(float32, adam), around(8e-3)),
    "factored Adam, scaled_sign(128)": Method("its own", factored_adam(sign128), around(12e-3)),
    "factored Adam, int2": Method("its own", factored_adam(int2), around(12e-3)),
    "4 local steps, scaled_sign": local_steps(4, sign),
    "4 local steps, scaled_sign, outer momentum": outer_momentum(4, 0.75, sign),
    "1-bit Adam": Method("its own", one_bit_adam, around(3e-3), lambda steps: 0.15),
    "int4, feedback": Method("adam", before(int4, adam), around(8e-3)),
    "int2, feedback": Method("adam", before(int2, adam), around(4e-3)),
    "scaled_sign, feedback": Method("adam", before(sign, adam), around(1e-3)),
    "factored Adam, int4": Method("its own", factored_adam(int4), around(12e-3)),
    "factored Adam, scaled_sign(1024)": Method("its own", factored_adam(sign), around(12e-3)),
    "PowerSGD, rank 4": Method("adam", before(low_rank, adam), around(2e-3)),
    "top-k of chunks, feedback": Method("adam", before(chunks, adam), around(2e-3)),
    "cnat": Method("adam", before(cnat, adam), around(8e-3)),
    "local momentum, vote": Method("signum", signum, around(1e-3)),
    "local Adam, scaled_sign": Method("local adam", behind(ADAM_STEP, sign), around(2e-3)),
    "factored Nadam, scaled_sign(128)": Method(
        "factored nadam", factored_adam(sign128, nesterov=True), around(12e-3)
    ),
    "local Nadam, scaled_sign": Method("local nadam", behind(NADAM_STEP, sign), around(8e-3)),
    "local Nadam, int2": Method("local nadam", behind(NADAM_STEP, int2), around(8e-3)),
    "4 local steps of Nadam, scaled_sign": local_steps(4, sign, "local nadam", nadam),
    "Nadam, float32": Method("nadam", before(float32, nadam), around(4e-3)),
    "Nadam, int2, feedback": Method("nadam", before(int2, nadam), around(4e-3)),
    "Nadam, PowerSGD, rank 4": Method("nadam", before(low_rank, nadam), around(4e-3)),
    "factored Adam, float32": Method("its own", factored_adam(float32), around(12e-3)),
    "bfloat16": Method("adam", before(bfloat16, adam), around(8e-3)),
    "TopkA, 1 %, decay 0.99, sign": Method("demo", demo(0.01, 0.99), around(4e-3)),
    "15 local steps, TopkA, 3 %, decay 0.95": local_steps(15, partial(decaying, 0.03, 0.95)),
    "15 local steps, top-k of chunks, decay 0.95": local_steps(
        15, partial(chunks, 0.95), rate=24e-3
    ),
    "4 local steps, top-k of chunks, outer momentum": outer_momentum(
        4, 0.75, partial(chunks, 0.95)
    ),
    "Ok-Topk, 1 %": Method("adam", before(oktopk, adam), around(1e-3)),
    "int4, feedback, 16-bit residuals": Method(
        "adam", before(partial(feedback, "int4", "bfloat16"), adam), around(8e-3)
    ),
    "factored Nadam, scaled_sign(128), 16-bit residuals": Method(
        "factored nadam",
        factored_adam(partial(feedback, SIGN128, "bfloat16"), nesterov=True),
        around(12e-3),
    ),
}


# What stands in front of SGD.
EXCHANGES: dict[str, Callable[[], optax.GradientTransformation]] = {
    "float32": float32,
    "scaled_sign, feedback": sign,
    "scaled_sign(128), feedback": sign128,
    "int2, feedback": int2,
    "Ok-Topk, 1 %": oktopk,
    "top-k of chunks, feedback": chunks,
    "PowerSGD, rank 4": low_rank,
    "int4, feedback": int4,
    "cnat": cnat,
    "bfloat16": bfloat16,
}


def in_front(
    name: str, optimizer: Callable[[optax.Schedule], optax.GradientTransformation], rate: float
) -> dict[str, Method]:
    """All of these in front of an optimizer."""
    return {
        exchange: Method(name, before(make, optimizer), around(rate))
        for exchange, make in EXCHANGES.items()
    }


def for_sgd(rate: float, of_votes: float) -> dict[str, Method]:
    """The methods for SGD, with rates around these; those that are compared most come first."""
    vote = {"local momentum, vote": Method("signum", signum, around(of_votes))}
    return in_front("sgd", sgd, rate) | vote


def for_nesterov(rate: float, of_votes: float) -> dict[str, Method]:
    """The same with Nesterov's momentum, after the exchange or on each device."""
    own = {"scaled_sign": sign, "scaled_sign(128)": sign128, "int2": int2}
    own["scaled_sign, 16-bit residuals"] = partial(feedback, "scaled_sign", "bfloat16")
    own_momentum = {
        f"local momentum, {name}": Method(
            "local nesterov", behind(NESTEROV_STEP, exchange), around(rate)
        )
        for name, exchange in own.items()
    }
    vote = behind(NESTEROV_STEP, lambda: jaxcomm.majority_vote("data"))
    return (
        in_front("nesterov", nesterov, rate)
        | own_momentum
        | {
            "local momentum, vote": Method("signum", vote, around(of_votes)),
            "4 local steps, scaled_sign": local_steps(4, sign, "local nesterov", nesterov, rate),
            "Ok-Topk, 1 %, 16-bit residuals": Method(
                "nesterov", before(partial(oktopk, "bfloat16"), nesterov), around(rate / 2)
            ),
        }
    )
