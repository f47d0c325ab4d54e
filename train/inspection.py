"""Inspects the exchange every n steps: how large gradients are, what it loses, what it keeps.

A look is a separate compiled program, so a training step does no more than it has to. It computes
the gradient of a batch once more, exchanges it as the next step would, and changes nothing. It
takes as long as a step, a float32 mean and, for votes, one more vote.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomm
from train import sync, watched

# Methods whose result is a mean of gradients, or points in its direction, and can be compared with
# the exact mean. The other methods of `train.sync` are optimizers.
MEANS = ("mean", "sparse_mean", "low_rank_mean")
VOTE = "majority_vote"

Look = Callable[[Any, Any], dict[str, float]]


def of_run(run: Any, config: Any, now: Any) -> Look | None:
    """What `make_look` makes for a `train.run.Run`, compiled; None if no step is looked at."""
    every = config.inspect.every
    if not every or config.steps // every == int(now.step) // every:
        return None
    parts = run.sync, run.gradient, run.exchange, run.order
    return make_look(*parts, config.steps, config.seed, (now, run.example))


def make_look(
    config: Any,
    gradient: Any,
    exchange: Any,
    order: Sequence[str],
    steps: int,
    seed: int,
    like: tuple[Any, Any],
) -> Look:
    """A function of a state and a global batch.

    Args:
      config: `config.sync`, with the method that is in use.
      gradient: the result of `step.make_gradient`.
      exchange: the result of `sync.build`.
      order: the order of the gradients, as `sync.build` takes it.
      steps: the length of the run.
      seed: the seed, as `sync.build` takes it.
      like: a state and a batch to compile it for.

    Returns:
      `look(state, batch) -> numbers`, equal on all processes:

        gradient_norm         of the exact mean over the devices
        device_gradient_norm  of each device's gradient, root mean square over the devices
        residual_norm         of what each device keeps, likewise; with error feedback
        error                 norm of result minus exact mean, over the norm of the exact mean
        cosine                of the angle between the result and the exact mean
        zeroed                share of values that are zero in the result, not in the mean
        ties                  share of votes that tie, of values that are voted on
        overflow              1 if finite gradients became an infinite result, else 0

      The last five exist only for methods whose result is a mean or a vote of gradients, exchanged
      separately in every step. A vote without scales has no `error`. Gradients of parameters that
      are split over the devices are not inspected.
    """
    by_itself = config.every == 1 and config.method in (*MEANS, VOTE)
    by_itself &= not config.get("local_optimizer")
    has_size = config.method in MEANS or bool(config.error_feedback)
    voting = _undecided(config, order, steps, seed) if config.method == VOTE else None

    def look(state: Any, batch: Any) -> dict[str, jax.Array]:
        values = watched.residual_norm(state.opt_state)
        if config.get("gather") or config.get("fsdp", 1) > 1:
            return values
        _, grads = gradient(sync.for_loss(state.params, state.opt_state), batch)
        own = jax.tree.leaves(jaxcomm.unmark_local(grads))  # Each has a leading device axis.
        devices = own[0].shape[0]
        # Divided first: the sum of finite values is finite.
        exact = [(x.astype(jnp.float32) / devices).sum(0) for x in own]
        values["gradient_norm"] = norm(exact)
        values["device_gradient_norm"] = norm(own) / devices**0.5
        if not by_itself:
            return values
        before = state.opt_state[0]  # `sync.joined` puts the exchange before the optimizer.
        sent = jax.tree.leaves(exchange.update(grads, before, state.params)[0])
        values |= compared(sent, exact, has_size)
        if voting is not None:
            decided, _ = voting.update(grads, before, state.params)
            values["ties"] = _share_of_ties(jax.tree.leaves(decided), before)
        return values

    jitted = jax.jit(look, compiler_options=jaxcomm.compiler_options())
    compiled = jitted.lower(*like).compile()
    return lambda state, batch: {k: float(v) for k, v in compiled(state, batch).items()}


def compared(
    sent: Sequence[jax.Array], exact: Sequence[jax.Array], has_size: bool = True
) -> dict[str, jax.Array]:
    """Compares the result of an exchange with the exact mean.

    Args:
      sent: its result, arrays of float32.
      exact: the exact mean, likewise.
      has_size: whether the result has the size of the mean, and not only its direction.
    """
    pairs = list(zip(sent, exact, strict=True))
    size = norm(exact)
    inner = sum(jnp.vdot(s, e) for s, e in pairs)
    zeroed = sum(jnp.float32(((s == 0) & (e != 0)).sum()) for s, e in pairs)
    finite = [jnp.stack([jnp.isfinite(x).all() for x in xs]).all() for xs in (sent, exact)]
    values = {
        "cosine": _over(inner, norm(sent) * size),
        "zeroed": zeroed / sum(s.size for s in sent),
        "overflow": (finite[1] & ~finite[0]).astype(jnp.float32),
    }
    if has_size:
        values["error"] = _over(norm([s - e for s, e in pairs]), size)
    return values


def norm(arrays: Sequence[jax.Array]) -> jax.Array:
    """The Euclidean norm of all values of some arrays together."""
    return jnp.sqrt(jnp.float32(sum(jnp.square(x.astype(jnp.float32)).sum() for x in arrays)))


def _over(a: Any, b: Any) -> jax.Array:
    """The ratio; 0 if the denominator is 0."""
    return jnp.where(b == 0, 0.0, a / jnp.where(b == 0, 1.0, b))


def _undecided(config: Any, order: Sequence[str], steps: int, seed: int) -> Any:
    """The same vote with ties that give zero, so that they can be counted."""
    undecided = config.copy_and_resolve_references()
    undecided.ties = "zero"
    return sync.build(undecided, order, steps, seed)


def _share_of_ties(decided: Sequence[jax.Array], before: Any) -> jax.Array:
    states = jax.tree.leaves(before, is_leaf=_is_vote)
    (layout,) = {state.layout for state in states if _is_vote(state)}
    voted = [x for x, leaf in zip(decided, layout.leaves, strict=True) if not leaf.exempt]
    ties = [jnp.float32((x == 0).sum()) for x in voted]
    return jnp.float32(sum(ties)) / max(sum(x.size for x in voted), 1)


def _is_vote(node: Any) -> bool:
    return isinstance(node, jaxcomm.MajorityVoteState)
