"""Ways of exchanging gradients one after another: dense at first, sparser later."""

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _branches
from jaxcomm._numbers import is_integer
from jaxcomm._placing import note_settings
from jaxcomm.transforms import _roles
from jaxcomm.transforms._layout import axis_of
from jaxcomm.transforms._states import require_kind
from jaxcomm.transforms._wrappers import refuse_wrappers, with_extra_args
from jaxcomm.transforms.mean import mean
from jaxcomm.transforms.per_device import is_own


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Slots:
    """`of[i]` is the place of stage i's state among the states that are kept."""

    of: tuple[int, ...]


class StagesState(NamedTuple):
    """The state of `stages` and `dense_first`.

    Attributes:
      step: int32, the steps taken.
      slots: which stage has which state.
      inner: the states; neighbouring stages whose states look alike share one.
    """

    step: jax.Array
    slots: _Slots
    inner: tuple[Any, ...]

    @property
    def roles(self) -> frozenset[str]:
        """Those of all stages."""
        return _roles.roles_of(self.inner)


def stages(
    *plan: tuple[int, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Exchanges gradients in several ways one after another, such as in fewer and fewer bits.

    All stages are branches of one compiled program, chosen by the step, so a plan should be short.
    XLA overlaps no collective in a branch. `update(..., stage=2)` chooses instead of the step, and
    makes no branch: where steps are jitted, `stage`, counted from 1, is a static argument, and each
    stage has its own program.

    A stage hands its state, residuals included, to the next one if both states have the same
    structure and shapes: give every `jaxcomm.mean` of a plan the same `error_feedback` and
    `exempt`. The optimizer belongs after the stages, where all of them share its state.

    Args:
      *plan: for each stage, in order, the pair (first step, transformation); the first is step 0.

    Returns:
      A transformation used like those of the plan.

    Raises:
      TypeError: for a stage that is not such a pair; by `update` if `stage` is known on the devices
        only.
      ValueError: if the steps do not ascend from 0; by `init` if a stage would end with a residual,
        or with an optimizer's moments, that the next stage cannot hold; by `update` if there is no
        such stage.

    Wire: that of the current stage, in a branch of a conditional; with `stage`, in none.

    Example:
      >>> import jaxcomm
      >>> tx = jaxcomm.stages(
      ...     (0, jaxcomm.mean("data", "int8", error_feedback=True)),
      ...     (1000, jaxcomm.mean("data", "int4", error_feedback=True)),
      ... )
    """
    for stage in plan:
        if not _is_stage(stage):
            raise TypeError(
                "a stage is a pair of its first step and what it does, such as "
                f'(1000, jaxcomm.mean("data", "int8")), got {stage!r}.'
            )
    starts = [start for start, _ in plan]
    if not plan or starts[0] != 0 or any(a >= b for a, b in zip(starts, starts[1:], strict=False)):
        raise ValueError(f"the first steps of stages must ascend from 0, got {starts}.")
    chain = [optax.with_extra_args_support(tx) for _, tx in plan]

    def init_fn(params: Any) -> Any:
        refuse_wrappers()
        note_settings(starts)
        of, kept = [], []
        for state in (tx.init(params) for tx in chain):
            _refuse_in_backward(state, "stages")
            if _roles.roles_of(state) <= {_roles.OTHER, _roles.LOCAL}:
                raise ValueError(
                    "a stage exchanges nothing: each is an exchange, such as jaxcomm.mean, and "
                    "the optimizer comes after the stages."
                )
            is_new = not kept or not _look_alike(state, kept[-1])
            if kept and is_new:
                _refuse_to_lose(kept[-1])
            if is_new:
                kept.append(state)
            of.append(len(kept) - 1)
        return StagesState(jnp.zeros((), jnp.int32), _Slots(tuple(of)), tuple(kept))

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        refuse_wrappers()
        require_kind(state, StagesState)
        stage, extra_args = _branches.told("stages", extra_args, "stage")

        def branch(slot: int, tx: optax.GradientTransformationExtraArgs) -> Any:
            def run() -> tuple[Any, tuple[Any, ...]]:
                out, new = tx.update(updates, state.inner[slot], params, **extra_args)
                return out, (*state.inner[:slot], new, *state.inner[slot + 1 :])

            return run

        branches = [branch(slot, tx) for slot, tx in zip(state.slots.of, chain, strict=True)]
        if stage is not None:
            out, inner = branches[_index(stage, len(branches))]()
            return out, StagesState(state.step + 1, state.slots, inner)
        number = sum(((state.step >= start).astype(jnp.int32) for start in starts), jnp.int32(-1))
        with _branches.named([f"from step {start}" for start in starts]):
            out, inner = jax.lax.switch(number, branches)
        return out, StagesState(state.step + 1, state.slots, inner)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def dense_first(
    inner: optax.GradientTransformation,
    steps: int,
    dense: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Exchanges gradients in float32 for some steps, and then by `inner`.

    Both are branches of one compiled program, and XLA overlaps no collective in a branch.
    `update(..., dense=True)`, or False, decides instead of `steps`, and makes no branch: where
    steps are jitted, `dense` is a static argument, and there are two programs.

    Args:
      inner: the exchange after these steps; the optimizer belongs after `dense_first`.
      steps: the number of dense steps; 0 means none.
      dense: the exchange in these steps; None means `jaxcomm.mean` in float32 over the axis of
        `inner`.

    Returns:
      A transformation used like `inner`; without dense steps it is `inner`, which takes no `dense`.

    Raises:
      TypeError: for what is not a transformation; by `update` if its `dense` is known on the
        devices only.
      ValueError: for a negative number of steps; by `init` as for `stages`, and without `dense`
        also if `inner` is more than an exchange, such as a chain with `jaxcomm.local`, or has the
        momentum of the optimizer; by `update` if its `dense` is neither True nor False.

    Wire: that of `dense`, then that of `inner`, in the branches of a conditional; if `update` is
    told which, in none.

    Example:
      >>> import jaxcomm
      >>> tx = jaxcomm.dense_first(jaxcomm.mean("data", "int4", error_feedback=True), steps=100)
    """
    if not is_integer(steps) or steps < 0:
        raise ValueError(f"dense_first needs a number of steps of at least 0, got {steps!r}.")
    with_extra_args(inner, "dense_first", "inner")
    if dense is not None:
        with_extra_args(dense, "dense_first", "dense")
    if steps == 0:
        return cast(optax.GradientTransformationExtraArgs, inner)
    both = stages((0, _mean_over_same_axis(inner) if dense is None else dense), (steps, inner))

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        is_dense, others = _branches.known_on_the_host("dense_first", extra_args, name="dense")
        stage = {} if is_dense is None else {"stage": 1 if is_dense[0] else 2}
        return both.update(updates, state, params, **others, **stage)

    return optax.GradientTransformationExtraArgs(both.init, update_fn)


def _index(stage: Any, count: int) -> int:
    """The index of a stage that the host names."""
    if not is_integer(stage) or not 1 <= stage <= count:
        raise ValueError(f"this plan takes stage=1 to {count}, got {stage!r}.")
    return int(stage) - 1


def _mean_over_same_axis(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The float32 mean over the axis of `inner`, which the state of `inner` knows."""

    def init_fn(params: Any) -> Any:
        state = inner.init(params)
        axis_name = axis_of(state, "dense_first")
        if _roles.LOCAL in _roles.roles_of(state):
            raise ValueError(
                "dense_first replaces all of inner by a mean, including what comes before its "
                "exchange. Put that first: optax.chain(jaxcomm.local(...), jaxcomm.dense_first("
                "exchange, steps)); or, if the exchange is a mean, pass the transformation of the "
                "first steps as dense=, with the error_feedback and residual_dtype of this mean."
            )
        if _roles.WRAPPED in _roles.roles_of(state):
            raise ValueError(
                "dense_first takes an exchange alone, and this one is inside a wrapper, such as "
                "optax.partition. Put dense_first into the wrapper; or pass the transformation of "
                "the first steps as dense=."
            )
        if _roles.roles_of(state) & {_roles.FINISHED, _roles.OTHER}:
            raise ValueError(
                "dense_first replaces all of inner by a mean, and this inner is more than an "
                "exchange. Put the optimizer after it: optax.chain(jaxcomm.dense_first(exchange, "
                "steps), optimizer); or pass the transformation of the first steps as dense=."
            )
        _refuse_in_backward(state, "dense_first")
        if _roles.MOMENTA in _roles.roles_of(state):
            raise ValueError(
                "inner takes means of the devices' momenta, and a float32 mean of gradients in its "
                "place would have no momentum: use jaxcomm.sparse_mean(..., momentum_correction="
                "..., dense_steps=...), whose dense steps have the same momentum."
            )
        return mean(axis_name).init(params)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return mean(state.layout.axis_name).update(updates, state, params)

    return optax.GradientTransformation(init_fn, update_fn)


def _refuse_in_backward(state: Any, who: str) -> None:
    """Raises if the state is that of an exchange in the backward pass."""
    if _roles.IN_BACKWARD in _roles.roles_of(state):
        raise ValueError(
            f"{who} exchanges local gradients, and an exchange in the backward pass leaves none of "
            f"them. Put it inside: jaxcomm.in_backward(jaxcomm.{who}(...), layers). Parameters of "
            "jaxcomm.sharded are exchanged the same way in all steps."
        )


def _is_stage(stage: Any) -> bool:
    if not isinstance(stage, tuple) or len(stage) != 2:
        return False
    start, tx = stage
    return is_integer(start) and isinstance(tx, optax.GradientTransformation)


def _look_alike(a: Any, b: Any) -> bool:
    """Whether a stage can continue with the state of another."""
    types = [[(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(s)] for s in (a, b)]
    return jax.tree.structure(a) == jax.tree.structure(b) and types[0] == types[1]


def _refuse_to_lose(state: Any) -> None:
    """Raises if the state of a stage that ends holds what the next one would lose."""
    if _roles.FINISHED in _roles.roles_of(state) or _arrays_of_others(state):
        raise ValueError(
            "a stage would end with the state of an optimizer, such as moments or a count, that "
            "the next stage cannot hold. Put the optimizer after the stages: "
            "optax.chain(jaxcomm.stages(...), optimizer)."
        )
    own = filter(is_own, jax.tree.leaves(state, is_leaf=is_own))
    if any(node.values for node in own):
        raise ValueError(
            "a stage would end with per-device state, such as a residual, that the next stage "
            "cannot hold. Only stages of the same kind pass it on: give all error_feedback=True, "
            "the same residual_dtype and the same exempt leaves (a float32 mean too: it then sends "
            "what is left), or the same rank; or put jaxcomm.local before the stages."
        )


def _arrays_of_others(state: Any) -> bool:
    """Whether a transformation that is not jaxcomm's keeps anything in this state."""
    if type(state) is tuple:
        return any(map(_arrays_of_others, state))
    is_other = _roles.roles_of(state) <= {_roles.OTHER, _roles.WRAPPED}
    return is_other and bool(jax.tree.leaves(state))
