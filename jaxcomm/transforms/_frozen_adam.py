"""The arithmetic of Adam with a variance that is frozen after a warm-up, as in 1-bit Adam."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axes
from jaxcomm.transforms._exchange import Arrays
from jaxcomm.transforms._layout import Layout
from jaxcomm.transforms._optimizer import check_adam, check_number, decayed, is_count, rate_after
from jaxcomm.transforms._specs import names_in


@dataclasses.dataclass(frozen=True)
class FrozenAdam:
    """The arithmetic of Adam, and when its warm-up ends; every device does the same."""

    learning_rate: optax.ScalarOrSchedule
    b1: float
    b2: float
    eps: float
    weight_decay: float
    mask: Any
    dense_steps: int | None
    variance_stability: float | None

    def __post_init__(self) -> None:
        check_adam(self.learning_rate, self.b1, self.b2, self.eps, self.weight_decay)
        steps, stability = self.dense_steps, self.variance_stability
        if steps is None and stability is None:
            raise ValueError(
                "say when the warm-up ends: give total_steps (of the run), dense_steps, or "
                "variance_stability (such as 0.96)."
            )
        if steps is not None:
            whole = "a whole number >= 1, as a variance is needed to freeze it"
            check_number("dense_steps", steps, is_count, whole)
        if stability is not None:
            check_number("variance_stability", stability, lambda x: 0 < x <= 1, "in (0, 1]")

    @property
    def norms_kept(self) -> int:
        """The number of steps between the norms of v that are compared; 0 if none are."""
        return 0 if self.variance_stability is None else round(1 / (1 - self.b2))

    def m(self, m: jax.Array, g: jax.Array) -> jax.Array:
        """The next momentum; g may have a device axis."""
        return self.b1 * jnp.expand_dims(m, range(g.ndim - m.ndim)) + (1 - self.b1) * g

    def v(self, v: jax.Array, g: jax.Array) -> jax.Array:
        """The next variance."""
        return self.b2 * v + (1 - self.b2) * jnp.square(g)

    def is_sound(self, state: Any, frozen: jax.Array | bool) -> jax.Array:
        """Whether there is a rate and, where the host says that v is frozen, v has seen a step."""
        finite = jnp.isfinite(rate_after(self.learning_rate, state.count))
        return finite & (state.count > 0) if frozen is True else finite

    def steps(
        self, m: Arrays, v: Arrays, state: Any, params: Any, frozen: jax.Array | bool
    ) -> Arrays:
        """What to add to the parameters.

        Args:
          m: the next momentum.
          v: the next variance.
          state: the state of `one_bit_adam` before the step.
          params: the parameters, for weight decay.
          frozen: whether v did not change in this step; True if the host says so.
        """
        rate, count = rate_after(self.learning_rate, state.count), state.count + 1
        last = state.count if frozen is True else count
        seen = jnp.where(state.frozen_at > 0, state.frozen_at, last)  # gradients that v has seen
        # Factors, as XLA merges two divisions in a row, and that of `computed_once` must stay.
        more_m = 1 / (1 - self.b1 ** count.astype(jnp.float32))
        more_v = 1 / (1 - self.b2 ** seen.astype(jnp.float32))
        steps = [
            jnp.where(v > 0, m * more_m / (jnp.sqrt(v * more_v) + self.eps), 0.0)
            for m, v in zip(m, v, strict=True)
        ]
        return [-rate * step for step in decayed(steps, params, self.mask, self.weight_decay)]

    def end_of_warmup(
        self, v: Arrays, count: jax.Array, state: Any, frozen: jax.Array | bool
    ) -> tuple[jax.Array, Any]:
        """The next `frozen_at` and `norms`; `frozen` is True if the host says so."""
        if frozen is True:  # perhaps before its time
            return jnp.where(state.frozen_at > 0, state.frozen_at, state.count), state.norms
        threshold, ended, norms = self.variance_stability, jnp.bool_(False), ()
        if threshold is not None:
            norm = _norm(v, state.layout) / (1 - self.b2 ** count.astype(jnp.float32))
            place = count % self.norms_kept
            old, norms = state.norms[place], state.norms.at[place].set(norm)
            stable = jnp.minimum(norm, old) >= threshold * jnp.maximum(norm, old)
            ended = stable & (norm > 0) & (count > self.norms_kept)
        if self.dense_steps is not None:
            ended |= count >= self.dense_steps
        return jnp.where(ended & (state.frozen_at == 0), count, state.frozen_at), norms


def _norm(v: Arrays, layout: Layout) -> jax.Array:
    """The L1 norm of v, equal on all devices."""
    mesh, own = _axes.current_mesh(), _axes.names_of(layout.axis_name)
    # In the manual view we see parts of leaves that are sharded over other axes. A leaf that was
    # not sharded in `init` weighs less; what matters is that all devices get the same norm.
    further = _axes.manual_axes().difference(own)
    norm = jnp.zeros((), jnp.float32)
    for x, leaf in zip(v, layout.leaves, strict=True):
        shards = math.prod(mesh.shape[axis] for axis in names_in(leaf.spec) & further)
        norm += jnp.sum(x) * shards
    if not further:
        return norm
    if _axes.checks_on(layout.axis_name):
        norm = _axes.as_varying(norm, further)
    return jax.lax.pmean(norm, tuple(sorted(further)))
