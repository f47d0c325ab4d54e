"""Refuses optax wrappers that would break a synchronised step, and names the fix."""

import contextlib
import contextvars
import warnings
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomm._context import holding
from jaxcomm._users_line import users_line
from jaxcomm.transforms._chains import (
    MUON,
    VARIANCES,
    Init,
    factory_of,
    inits_before,
    inits_behind,
    moments_behind,
    moments_in,
    names_in,
    optax_callers,
    rates_behind,
    warn_unless_chains_are_seen,
)

_CURES = {
    "apply_if_finite": (
        "optax.apply_if_finite looks at local gradients, so devices would disagree. Put it around "
        "the optimizer only: optax.chain(jaxcomm.mean(...), optax.apply_if_finite(optimizer, 3)); "
        "in jaxcomm.local_steps, around the outer one; after jaxcomm.factored_adam or "
        "jaxcomm.one_bit_adam, which are optimizers, optax.apply_if_finite(optax.identity(), 3). "
        "A non-finite gradient on any device makes jaxcomm's update NaN on all of them."
    ),
    "MultiSteps": (
        "optax.MultiSteps keeps one accumulator for all devices, but gradients are local before "
        "they are exchanged. Use jaxcomm.multi_steps(inner, every), or for microbatches (also with "
        "sharded parameters) jaxcomm.accumulate."
    ),
    "flatten": (
        "optax.flatten joins all leaves, so their paths and shapes, which decide what is exempt, "
        "are lost. Put it around the optimizer only: "
        "optax.chain(jaxcomm.mean(...), optax.flatten(optimizer))."
    ),
    "conditionally_mask": (
        "optax.conditionally_mask would hide local gradients in some steps. Put it around the "
        "optimizer only, or change the exchange with jaxcomm.stages."
    ),
    "conditionally_transform": (
        "optax.conditionally_transform would leave local gradients as they are in some steps. Put "
        "it around the optimizer only, or change the exchange with jaxcomm.stages."
    ),
}
_ZEROS = (
    "what comes before the exchange sets local gradients to zero (optax.set_to_zero or "
    "optax.transforms.freeze), but this exchange has no code for zero, so it would move what "
    'should be frozen. Leave that out, and write optax.partition({"trained": chain, "frozen": '
    "jaxcomm.set_to_zero(axis_name)}, labels)."
)
# What would look at local gradients before the exchange, and their dtype cannot refuse.
_IN_FRONT = {
    "zero_nans": (
        "optax.zero_nans cannot see local gradients, and would change nothing. Apply it to those "
        'of each device: jaxcomm.local("data", optax.zero_nans()).'
    ),
    "conditionally_mask": _CURES["conditionally_mask"],
}
# What is in optax.sgd, and may be around it.
_OF_SGD = {"chain", "init_empty_state", "scale_by_schedule", "with_extra_args_support"}
_OF_SGD |= {"masked", "partition", "named_chain", "set_to_zero"}
# Bits per value that error feedback before them needs, as measured.
_ENOUGH_FOR_ADAM, _ENOUGH_FOR_MUON = 4, 8
# What moves parameters beside the update that it wraps, and what it must not be around.
_MOVERS = {"lookahead", "mechanize", "schedule_free"}
_LOOKAHEAD = {
    "local_steps": "is lookahead already: write every=sync_period and "
    "outer=optax.sgd(slow_step_size)",
    "multi_steps": "has updates of zero in the steps in between, which lookahead would count. To "
    "average microbatches of one step, use jaxcomm.accumulate for the gradients and "
    "optax.lookahead(optax.chain(exchange, optimizer), ...)",
}
# The `init` of the optimizer after an exchange that is not in its chain: local_steps has it.
_OUTER: contextvars.ContextVar[Init | None] = contextvars.ContextVar("outer", default=None)
_NOT_AROUND = {
    "local_steps": "it moves the shared parameters, and devices train at their own, so the next "
    "exchange would undo that. Put it into the inner optimizer",
    "multi_steps": "it would count the steps in between, whose updates are zero. Put it inside: "
    "jaxcomm.multi_steps(optax.chain(exchange, wrapped), every)",
}


def with_extra_args(
    tx: Any, who: str, argument: str, example: str = "optax.trace(0.9)"
) -> optax.GradientTransformationExtraArgs:
    """The transformation, made by optax to take further arguments.

    Raises:
      TypeError: for what is not a transformation, such as a factory that was not called.
    """
    if not isinstance(tx, optax.GradientTransformation):
        call = "; call it" if callable(tx) else ""
        raise TypeError(
            f"{who} needs an optax transformation as {argument}, got {tx!r}{call}, as in {example}."
        )
    return optax.with_extra_args_support(tx)


def refuse_wrappers(has_zero: bool = True) -> None:
    """Raises if an optax wrapper that cannot work is calling.

    The dtype of local gradients refuses these too, but cannot name the fix.

    Args:
      has_zero: whether a gradient that is zero on all devices arrives as zero.

    Raises:
      ValueError: with the fix.
    """
    warn_unless_chains_are_seen()
    for wrapper in _CURES.keys() & optax_callers():
        raise ValueError(_CURES[wrapper])
    for init in inits_before():
        for name in _IN_FRONT.keys() & names_in(init, through_local=False):
            raise ValueError(_IN_FRONT[name])
        if not has_zero and "set_to_zero" in names_in(init):
            raise ValueError(_ZEROS)


def _as_user_wrote(init: Init) -> str:
    """What made it, or "another transformation" where that is optax's own helper."""
    name = factory_of(init)
    return "another transformation" if name in ("", "chain", "init_empty_state") else name


def refuse_states_before(name: str) -> None:
    """Raises, in `init` of an exchange of shards, if something with a state is before it.

    Such a state has the parameters' structure, and these gradients do not. What has none is refused
    by their dtype.
    """
    for init in inits_before():
        if factory_of(init) != "init_empty_state":
            raise ValueError(
                f"{_as_user_wrote(init)} comes before {name} in the chain, and would see gradients "
                f"that are not finished: put it after {name}."
            )


def refuse_all_behind(name: str) -> None:
    """Raises, in `init` of a method around optimizers, if anything follows in its chains."""
    for init in inits_behind():
        raise ValueError(
            f"{_as_user_wrote(init)} follows {name} in the chain, but the updates of {name} "
            f"are final. Put it into the inner optimizer or the outer one."
        )


def refuse_movers(name: str) -> None:
    """Raises, in `init`, if one is around a method that it would mislead, or that would undo it."""
    for mover in _MOVERS & optax_callers():
        if mover == "lookahead":
            raise ValueError(f"optax.lookahead is around {name}, which {_LOOKAHEAD[name]}.")
        raise ValueError(f"optax's {mover} is around {name}: {_NOT_AROUND[name]}.")


def parts_of_local_steps(*given: Any) -> list[optax.GradientTransformationExtraArgs]:
    """The inner and the outer optimizer and the exchange, all taking further arguments.

    Raises:
      TypeError: for what is not a transformation.
      ValueError: for `optax.lookahead` as an optimizer, which takes two trees.
    """
    examples = {
        "inner": "optax.adamw(1e-3)",
        "outer": "optax.sgd(0.7, momentum=0.9, nesterov=True)",
        "exchange": 'jaxcomm.mean("data", "int4", error_feedback=True)',
    }
    made = [
        with_extra_args(tx, "local_steps", argument, example)
        for tx, (argument, example) in zip(given, examples.items(), strict=True)
    ]
    for tx, which in zip(made, ("inner", "outer"), strict=False):
        refuse_lookahead(tx, "local_steps", f"the {which} optimizer of")
    return made


def refuse_lookahead(tx: optax.GradientTransformation, name: str, what: str) -> None:
    """Raises a ValueError if a part of a method is `optax.lookahead`, which takes two trees."""
    if "lookahead" in names_in(tx.init):
        raise ValueError(f"optax.lookahead cannot be {what} {name}, which {_LOOKAHEAD[name]}.")


def before_outer(init: Init) -> AbstractContextManager[None]:
    """Here the `init` of an exchange knows that of the optimizer of `local_steps` behind it."""
    return holding(_OUTER, init)


def _outer_moments(params: Any) -> set[str]:
    """The moments that the outer optimizer of `local_steps` keeps, if its `init` takes shapes."""
    if (init := _OUTER.get()) is not None:
        with contextlib.suppress(Exception):  # what is wrong there, its own call says
            return moments_in(init, params)
    return set()


def refuse_for_local_steps(inner: Any, outer: Any) -> None:
    """Raises, in `init` of local steps, for what is around them, and for optimizers uphill."""
    refuse_wrappers()
    refuse_all_behind("local_steps")
    refuse_movers("local_steps")
    for tx, which in ((inner, "inner"), (outer, "outer")):
        if _climb(tx, 1e3) > 0 > _climb(tx, -1e3):
            raise ValueError(
                f"the {which} optimizer of local_steps goes uphill: its updates have the sign of "
                "the gradients, and parameters are moved by adding them. After a part of an "
                "optimizer such as optax.trace(0.9), write optax.scale_by_learning_rate(rate); as "
                "the outer one, optax.sgd(1.0) takes the mean."
            )


def _climb(tx: optax.GradientTransformationExtraArgs, slope: float) -> float:
    """How far an optimizer moves one parameter in three steps on a slope.

    0 for one that needs other parameters, or climbs on purpose; and inside of `jax.shard_map`.
    """
    if "sam" in names_in(tx.init):
        return 0.0
    with contextlib.suppress(Exception), jax.ensure_compile_time_eval():
        params = {"w": jnp.zeros((1, 1), jnp.float32)}
        grads = {"w": jnp.full((1, 1), slope, jnp.float32)}
        state, moved = tx.init(params), 0.0
        for _ in range(3):
            updates, state = tx.update(grads, state, params)
            moved += sum(float(x.sum()) for x in jax.tree.leaves(updates))
        return moved
    return 0.0


def refuse_optimizer_behind(params: Any, name: str) -> None:
    """Raises, in `init` of a method that is an optimizer, if another one follows in its chain."""
    if moments := moments_behind(params):
        raise ValueError(
            f"{name} is an optimizer, and another one, which keeps {', '.join(sorted(moments))}, "
            f"follows it in the chain. The updates of {name} are final: remove the other one."
        )
    names = (names_in(init) for init in inits_behind())
    if rates_behind(params) or any("chain" in found and found <= _OF_SGD for found in names):
        raise ValueError(
            f"{name} is an optimizer, and another chain, such as optax.sgd, follows it, "
            f"which would reverse the sign of its updates. Those of {name} are final: remove "
            "the other one; if it is not an optimizer, put its members into this chain."
        )


def warn_of_few_bits(params: Any, exchange: str, bits: float = 0) -> None:
    """Warns, in `init`, about few bits with error feedback before an optimizer like Adam or Muon.

    Args:
      params: the parameters that `init` was called with.
      exchange: its name.
      bits: per value; 0 where no codec rounds.
    """
    moments = moments_behind(params) if bits < _ENOUGH_FOR_MUON else set()
    outer = _outer_moments(params) if bits < _ENOUGH_FOR_MUON else set()
    if outer & MUON or (outer & VARIANCES and bits < _ENOUGH_FOR_ADAM):
        warnings.warn(
            f"{exchange} with error feedback comes before an outer optimizer of local_steps that "
            "keeps a variance, such as Adam, or makes matrices orthogonal. Error feedback is for "
            "optimizers that are linear in what they get: few bits lose accuracy here. Send more "
            "bits, or take outer=optax.sgd(0.7, momentum=0.9, nesterov=True), after a sparse mean "
            "outer=optax.sgd(1.0).",
            UserWarning,
            stacklevel=users_line(),
        )
    elif moments & MUON:
        warnings.warn(
            f"{exchange} with error feedback comes before Muon, which makes matrices orthogonal, "
            "and so enlarges small errors: few bits lose accuracy here. Send int8 or more; or, "
            "where devices' data are alike, what each device's Muon would do: "
            "optax.chain(jaxcomm.local(axis_name, optax.chain(optax.contrib.muon(1.0), "
            "optax.scale(-1.0))), the mean, optax.scale_by_learning_rate(rate)).",
            UserWarning,
            stacklevel=users_line(),
        )
    elif bits < _ENOUGH_FOR_ADAM and moments & VARIANCES:
        warnings.warn(
            f"{exchange} with error feedback comes before an optimizer that keeps a variance, "
            "such as Adam. Error feedback is for optimizers that are linear in the gradient "
            "(arXiv:2102.02888): few bits lose accuracy here. Put the mean inside the optimizer, "
            "jaxcomm.factored_adam(jaxcomm.mean(...), learning_rate, nesterov=True); or, where "
            "devices' data are alike, the optimizer before the mean, jaxcomm.local(axis_name, "
            "optax.scale_by_adam(nesterov=True)); or send int4 or more bits.",
            UserWarning,
            stacklevel=users_line(),
        )
