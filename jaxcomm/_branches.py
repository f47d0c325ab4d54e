"""Branches of a program that have names when it is compiled, for `wire_report` to read."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _axes
from jaxcomm._cached_programs import refuse_cached_programs
from jaxcomm._numbers import is_integer

T = TypeVar("T")
_ONCE = "jaxcomm_once"


class NamedBranch(NamedTuple):
    """A branch of a conditional.

    Attributes:
      conditional: the instruction's name in the program.
      number: the number of the branch; of a `cond`, 0 is the false one.
      name: the name for users, such as "multi_steps: exchange".
      every: the branch is taken once in `every` times; 0 if the program does not say.
    """

    conditional: str
    number: int
    name: str
    every: int


@contextlib.contextmanager
def named(names: Sequence[str], every: Sequence[int] = ()) -> Iterator[None]:
    """Names the branches of a `jax.lax.cond` or `jax.lax.switch` that exchanges.

    Args:
      names: the names of the branches, of a `cond` the false one first; "" for none.
      every: each branch is taken once in so many times; 0 where that is not known.

    Raises:
      ValueError: where the exchange could meet others, see `refuse_cached_programs`.
    """
    exchange = next(filter(None, names))
    refuse_cached_programs(f"the optimizer exchanges in a conditional ({exchange!r})")
    pairs = zip(names, every or [0] * len(names), strict=True)
    text = "|".join(f"{name}={k}" if k else name for name, k in pairs)
    with jax.named_scope(f"branches[{text}]"):
        yield


def known_on_the_host(
    who: str, extra_args: Mapping[str, Any], count: int = 1, name: str = "due"
) -> tuple[list[bool] | None, dict[str, Any]]:
    """Which exchange is due in this step, if the caller of `update` said so by `due=`.

    Args:
      who: the transformation, for messages.
      extra_args: the extra arguments of `update`.
      count: the exchanges of which at most one is due in a step.
      name: of the argument.

    Returns:
      A flag for each exchange, or None if the state has to tell; and the other arguments.

    Raises:
      TypeError: for what is known on the devices only.
      ValueError: for what is neither False nor an exchange. These are counted from 1, as `jax.jit`
        has one program for the static arguments 0 and False.
    """
    due, others = told(who, extra_args, name)
    if due is None:
        return None, others
    if isinstance(due, (bool, np.bool_)):
        fits = count == 1 or not due
    else:
        fits = is_integer(due) and 0 <= due <= count
    if not fits:
        kinds = "True or False" if count == 1 else f"a fragment, 1 to {count}, or 0 for none"
        raise ValueError(f"{who} takes {name}={kinds}, got {due!r}.")
    return [number == int(due) for number in range(1, count + 1)], others


def told(who: str, extra_args: Mapping[str, Any], name: str) -> tuple[Any, dict[str, Any]]:
    """What the caller of `update` said of a step by an argument, or None; and the other arguments.

    Raises:
      TypeError: for what is known on the devices only.
    """
    others = dict(extra_args)
    said = others.pop(name, None)
    if isinstance(said, jax.Array):
        raise TypeError(
            f"{who} takes {name}= from the host, got {said}; make it a static argument of the "
            f"step: jax.jit(step, static_argnames={name!r})."
        )
    return said, others


def if_one_is_due(
    due: Sequence[jax.Array | bool],
    names: Sequence[str],
    every: int,
    functions: Sequence[Callable[[Any, T], T]],
    given: Any,
    state: T,
) -> T:
    """`if_due` of several functions, of which at most one is due in a step, each once in `every`.

    Between GPUs, what the others would change is copied only in the steps in which one is due.
    There is no branch if Python bools say which one it is.
    """
    if all(isinstance(flag, bool) for flag in due):
        ours = [f for flag, f in zip(due, functions, strict=True) if flag]
        return ours[0](given, state) if ours else state
    if len(functions) == 1:
        return if_due(due[0], names[0], every, functions[0], given, state)
    number = jnp.int32(0)
    for i, flag in enumerate(due):
        number = jnp.where(flag, i + 1, number)

    def chosen(given: tuple[Any, jax.Array], state: T) -> T:
        branches = [lambda _, state: state, *functions]  # as if there were no loop around them
        with named(["", *names], [0, *[every] * len(functions)]):
            return jax.lax.switch(given[1], branches, given[0], state)

    if not _as_a_loop():
        return chosen((given, number), state)
    return if_due(number > 0, "", 1, chosen, (given, number), state)


def if_due(
    due: jax.Array | bool, name: str, every: int, f: Callable[[Any, T], T], given: Any, state: T
) -> T:
    """`f(given, state)` in the steps in which it is due, otherwise `state`.

    Between GPUs it is a loop of one turn or none, and counts as a conditional. XLA writes what a
    loop carries over the old values; what a branch passes on it copies, with jax 0.10 twice.

    Args:
      due: bool scalar, equal on all devices; a Python bool makes no branch.
      name: the name of f for users, such as "multi_steps: exchange"; "" where a conditional inside
        of f says when something is sent.
      every: f is due once in so many steps.
      f: what exchanges.
      given: the arrays that f takes; it should not close over large ones.
      state: what f changes, typed as its result.
    """
    if isinstance(due, bool):
        return f(given, state) if due else state
    if not _as_a_loop():
        with named(["", name], [0, every]):
            return jax.lax.cond(due, lambda: f(given, state), lambda: state)
    leaves, treedef = jax.tree.flatten(given)
    # XLA moves out of a loop, and thus into every step, what no turn changes. So what f takes comes
    # out of a barrier together with a flag that a turn changes, typed as it is.
    groups: dict[frozenset[str], list[int]] = {}
    for i, x in enumerate(leaves):
        groups.setdefault(_axes.varying_axes(x), []).append(i)
    flags = [_axes.as_varying(due, axes) for axes in groups]

    def turn(carry: tuple[jax.Array, list[jax.Array], T]) -> tuple[Any, list[jax.Array], T]:
        again, flags, state = carry
        used, own = list(leaves), []
        for flag, group in zip(flags, groups.values(), strict=True):
            flag, *tied = jax.lax.optimization_barrier((flag, *[leaves[i] for i in group]))
            own.append(~flag)
            for i, x in zip(group, tied, strict=True):
                used[i] = x
        return ~again, own, f(treedef.unflatten(used), state)

    with named(["", name], [0, every]) if name else jax.named_scope(_ONCE):
        return jax.lax.while_loop(lambda carry: carry[0], turn, (due, flags, state))[2]


def replaced_if(
    due: jax.Array,
    name: str,
    f: Callable[[Any], list[jax.Array]],
    given: Any,
    otherwise: list[jax.Array],
) -> list[jax.Array]:
    """`f(given)` in the steps in which it is due, whenever these are, and else `otherwise`.

    Where that is a branch, it returns zeros in other steps, instead of copying what it passes on.

    Args:
      due: bool scalar, equal on all devices.
      name: the name of f for users.
      f: what exchanges.
      given: the arrays that f takes.
      otherwise: arrays that are computed in every step, typed as the result of f.
    """
    if _as_a_loop():
        return if_due(due, name, 0, lambda given, _: f(given), given, otherwise)
    with named([name, ""]):
        zeros = lambda _: [jnp.zeros_like(x) for x in otherwise]  # noqa: E731
        found = jax.lax.cond(~due, zeros, f, given)
    return [jnp.where(~due, *pair) for pair in zip(otherwise, found, strict=True)]


def _as_a_loop() -> bool:
    """Whether what is exchanged in some steps is a loop, rather than a branch.

    On CPUs, XLA does not keep the order of collectives in a loop among those that need nothing of
    it: control variates before a vote were seen to hang, with 8 weights of 1024 x 1024. On a single
    GPU, where nothing is sent, a branch is part of a CUDA graph, while a loop makes the host wait.
    Between GPUs it waits for both, and a loop takes less memory.
    """
    return _axes.platform() != "cpu" and jax.sharding.get_abstract_mesh().size > 1


def is_once(op_name: str) -> bool:
    """Whether a loop is one of `if_due` without a name, by its source location in the program."""
    return re.search(rf"\b{_ONCE}/while[^/]*$", op_name) is not None


def read(conditional: str, op_name: str) -> list[NamedBranch]:
    """The named branches of a conditional, read from its source location in the program.

    The condition of a loop of `if_due` is its branch 0, and the body branch 1.
    """
    found = re.search(r"branches\[([^\]]*)\]/(?:cond|switch|while)[^/]*$", op_name)
    parts = found[1].split("|") if found else []
    named = [(i, *part.partition("=")[::2]) for i, part in enumerate(parts) if part]
    return [NamedBranch(conditional, i, name, int(every or 0)) for i, name, every in named]
