"""What else stands in optax's chains with a transformation, and what is around it.

A transformation is not told. This looks at the call stack and into closures, at trace time only.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

import jax
import optax

from jaxcomm._users_line import users_line
from jaxcomm.transforms._shapes import shapes_of

Init = Callable[[Any], Any]

# Where optax's chains call their members: to `init`, and to `update`.
_CHAIN_INIT = "chain.<locals>.init_fn.<locals>.<genexpr>"
_NAMED_CHAIN_INIT = "named_chain.<locals>.init_fn"
_CHAIN_UPDATE, _NAMED_CHAIN_UPDATE = "chain.<locals>.update_fn", "named_chain.<locals>.update_fn"
# Fields of the states of optax and optax.contrib.
_MOMENTA = {"mu", "trace", "exp_avg", "e_x", "prev_updates", "previous_gradient"}
_MOMENTA |= {"diff_updates_memory"}
VARIANCES = {"nu", "sum_of_squares", "e_g", "v_row", "exp_avg_sq", "grad_sum_sq"}
MUON = {"ns_coeffs", "matrices"}  # and of `orthogonalize`
# States of optax in which steps whose updates are zero count as they should, or do little harm.
_IDLE = {"ApplyIfFiniteState", "MonitorState", "ReduceLROnPlateauState", "SnapshotState"}
_IDLE |= {"ZeroNansState"}


def inits_before() -> list[Init]:
    """The `init`s of the members before the caller in the optax chains around it; in `init`."""
    return [init for frame in _optax_frames() for init in _members(frame)[0]]


def inits_behind() -> list[Init]:
    """The `init`s of the members after the caller, likewise."""
    return [init for frame in _optax_frames() for init in _members(frame)[1]]


def factory_of(init: Init) -> str:
    """The name of what made a transformation."""
    return getattr(init, "__qualname__", "").split(".")[0]


def names_in(init: Init, through_local: bool = True) -> set[str]:
    """What made a transformation and those that it holds in closures."""
    return set(_functions_in(init, through_local).values())


def _functions_in(
    first: Init, through_local: bool = True, of_chains: str = "init_fns"
) -> dict[Any, str]:
    """The functions of a transformation and of those in closures, and what made them.

    The names of optax's are as they are; those of jaxcomm's begin with its name. Of chains either
    the `init`s or, as `update_fns`, the `update`s of the members are looked through.
    """
    seen: dict[Any, str] = {}
    waiting: list[Any] = [first]
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        is_ours = (function.__module__ or "").startswith("jaxcomm.")
        seen[function] = "jaxcomm." * is_ours + factory_of(function)
        if through_local or seen[function] != "jaxcomm.local":
            waiting += _held(function, of_chains)
    return seen


def _held(function: FunctionType, of_chains: str) -> Iterator[Any]:
    """The `init`s and `update`s of the transformations in the closure of another one's."""
    for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held = jax.tree.leaves(cell.cell_contents, is_leaf=_is_transformation)
        except Exception:  # noqa: BLE001, S112 - an empty cell, or a pytree of the user's own
            continue
        yield from (part for tx in held if _is_transformation(tx) for part in tx)
        if free == of_chains:
            yield from held


def _is_transformation(x: Any) -> bool:
    return isinstance(x, optax.GradientTransformation)


def moments_behind(params: Any) -> set[str]:
    """The moments of gradients kept by the transformations that follow in the same optax chains.

    A member of a chain is not told what follows it, so this looks at the call stack, in `init`.

    Args:
      params: the parameters that `init` was called with.

    Returns:
      Names of optax, such as "mu" and "trace" for momenta and "nu" for a variance.
    """
    return _kept_behind(params, _moments_of)


def moments_in(init: Init, params: Any) -> set[str]:
    """The moments of gradients that a transformation keeps, with the names of `moments_behind`."""
    nodes = jax.tree.leaves(shapes_of(init, params), is_leaf=lambda x: _moments_of(x) != set())
    return set().union(*map(_moments_of, nodes))


def rates_behind(params: Any) -> bool:
    """Whether a transformation follows that has a learning rate of `inject_hyperparams`."""

    def rates_of(node: Any) -> set[str]:
        return {"learning_rate"} & set(getattr(node, "hyperparams", ()))

    return bool(_kept_behind(params, rates_of))


def schedules_behind(params: Any) -> set[str]:
    """The schedules of the transformations that follow in the same optax chains, likewise.

    Returns:
      Names of optax, such as "scale_by_schedule" and "inject_hyperparams".
    """
    return _kept_behind(params, _schedules_of)


def arrays_behind(params: Any) -> set[str]:
    """The arrays of optax's own states of the transformations that follow, likewise.

    Returns:
      Their names, such as "count" and "ema"; not of those that only look on.
    """

    def is_known(node: Any) -> bool:
        return hasattr(node, "_fields") and type(node).__module__.startswith("optax")

    def named(state: Any) -> set[str]:
        found = set()
        for node in filter(is_known, jax.tree.leaves(state, is_leaf=is_known)):
            for field, value in zip(node._fields, node, strict=True):
                inside = jax.tree.leaves(value, is_leaf=is_known)
                is_idle = type(node).__name__ in _IDLE or field.startswith("inner_state")
                found |= named([x for x in inside if is_known(x)])
                found |= {field} if not is_idle and not all(map(is_known, inside)) else set()
        return found

    return set().union(*map(named, _states_behind(params)))


def decay_behind() -> bool:
    """Whether `optax.add_decayed_weights` follows in the same optax chains; in `update`."""
    return any(
        name == "add_decayed_weights" and not _has_rate_zero(function)
        for frame in _optax_frames()
        for update in _updates_behind(frame)
        for function, name in _functions_in(update, of_chains="update_fns").items()
    )


def _has_rate_zero(function: Any) -> bool:
    """Whether it decays by the Python number 0."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    rate = cells["weight_decay"].cell_contents if "weight_decay" in cells else None
    return isinstance(rate, int | float) and rate == 0


def _updates_behind(frame: FrameType) -> list[Init]:
    """The `update`s of the members after the caller, if the frame is an optax chain's."""
    name, own = frame.f_code.co_qualname, frame.f_locals
    if name == _CHAIN_UPDATE and own.get("fn") in (members := list(own.get("update_fns", ()))):
        return members[members.index(own["fn"]) + 1 :]
    if name == _NAMED_CHAIN_UPDATE:
        names = [name for name, _ in own.get("transforms", ())]
        here = names.index(own["name"]) if own.get("name") in names else len(names)
        return [tx.update for _, tx in own.get("transforms", ())][here + 1 :]
    return []


def _kept_behind(params: Any, of: Callable[[Any], set[str]]) -> set[str]:
    """What the states of the transformations that follow have, by the nodes of their states."""
    found = set()
    for state in _states_behind(params):
        found = found.union(*map(of, jax.tree.leaves(state, is_leaf=lambda x: of(x) != set())))
    return found


def _states_behind(params: Any) -> list[Any]:
    """The states, as shapes, of the transformations that follow in the same optax chains.

    Their own `init`, when called here, has no chain: where it looks for what follows, it would find
    this one again. One that reads the values of parameters has no shapes to look at.
    """
    states = []
    for frame in _optax_frames():
        for init in _members(frame)[1]:
            with contextlib.suppress(jax.errors.JAXTypeError):
                states.append(shapes_of(init, params))
    return states


def _members(frame: FrameType) -> tuple[list[Init], list[Init]]:
    """The `init`s of the members before and after the caller, if the frame is an optax chain's."""
    name, own, members, here = frame.f_code.co_qualname, frame.f_locals, [], None
    if name == _CHAIN_INIT and frame.f_back is not None:
        members = list(frame.f_back.f_locals.get("init_fns", ()))
        here = members.index(own.get("fn")) if own.get("fn") in members else None
    elif name == _NAMED_CHAIN_INIT:
        names = [name for name, _ in own.get("transforms", ())]
        members = [tx.init for _, tx in own.get("transforms", ())]
        here = names.index(own["name"]) if own.get("name") in names else None
    return ([], []) if here is None else (members[:here], members[here + 1 :])


@functools.cache
def warn_unless_chains_are_seen() -> None:
    """Warns, once, of an optax that makes chains in another way than is known here."""
    seen: list[int] = []
    before = len(list(_optax_frames()))  # of the user's own chain

    def look(params: Any) -> Any:
        frames = list(_optax_frames())
        seen.extend(
            len(part) for frame in frames[: len(frames) - before] for part in _members(frame)
        )
        return optax.EmptyState()

    probe, other = optax.GradientTransformation(look, optax.identity().update), optax.identity()
    optax.chain(other, probe, other).init({})
    optax.named_chain(("a", other), ("b", probe), ("c", other)).init({})
    if sorted(filter(None, seen)) != [1] * 4:
        warnings.warn(
            f"optax {optax.__version__} builds chains in a way that this version of jaxcomm does "
            "not know, so a wrong order cannot be detected: put the exchange first, with only "
            "jaxcomm.local before it, and no optimizer after one_bit_adam or factored_adam.",
            UserWarning,
            stacklevel=users_line(),
        )


def _moments_of(node: Any) -> set[str]:
    fields = set(getattr(node, "_fields", ()))
    if fields.issuperset({"m", "v", "n", "g"}) or fields == {"t", "m", "n"}:
        return {"nu"}  # Adan's, and that of simplified AdEMAMix
    return (_MOMENTA | VARIANCES | MUON) & fields


def _schedules_of(node: Any) -> set[str]:
    if isinstance(node, optax.ScaleByScheduleState):
        return {"scale_by_schedule"}
    return {"inject_hyperparams"} if "hyperparams" in getattr(node, "_fields", ()) else set()


def optax_callers() -> set[str]:
    """The outermost names of the optax functions on the call stack: "masked", "chain", ..."""
    return {frame.f_code.co_qualname.split(".")[0] for frame in _optax_frames()}


def _optax_frames() -> Iterator[FrameType]:
    """The calls of optax on the call stack, innermost first, up to where a chain looks ahead."""
    frame = sys._getframe(1)
    ahead = _states_behind.__code__
    looking = frame.f_code is ahead  # itself
    while frame is not None and (looking or frame.f_code is not ahead):
        if frame.f_globals.get("__name__", "").startswith("optax."):
            yield frame
        frame, looking = frame.f_back, False
