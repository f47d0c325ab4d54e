"""Branches of conditionals that have names in the compiled program, for `wire_report` to read."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from jaxcomm._cached_programs import refuse_cached_programs


class NamedBranch(NamedTuple):
    """A branch of a conditional.

    Attributes:
      conditional: the instruction's name in the program.
      number: the number of the branch; 0 is the false one, 1 the true one.
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
      names: the names of the branches, the false one first; "" for none.
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


def read(conditional: str, op_name: str) -> list[NamedBranch]:
    """The named branches of a conditional, read from its source location in the program."""
    found = re.search(r"branches\[([^\]]*)\]/(?:cond|switch)[^/]*$", op_name)
    parts = found[1].split("|") if found else []
    named = [(i, *part.partition("=")[::2]) for i, part in enumerate(parts) if part]
    return [NamedBranch(conditional, i, name, int(every or 0)) for i, name, every in named]
