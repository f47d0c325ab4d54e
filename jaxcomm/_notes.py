"""Notes attached to collectives while tracing; `jaxcomm.explain` reads them back."""

import contextlib
import contextvars
import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax


class Message(NamedTuple):
    """What the collectives of a part of a program send.

    Attributes:
      name: "bucket", "exempt", "gathered", "gradient", or a method's own name: "squares" of
        `factored_adam`, "dense" of `one_bit_adam`.
      leaves: the leaves, as their numbers in the layout or as paths.
    """

    name: str
    leaves: tuple[Any, ...]


Notes = dict[int, Any]  # by number
NOTES: contextvars.ContextVar[Notes | None] = contextvars.ContextVar("notes", default=None)
_numbers = itertools.count()  # never reused: a trace that jax kept has those of an earlier call


@contextlib.contextmanager
def noted(what: Any) -> Iterator[None]:
    """Attaches a note to all that is traced here; no effect where notes are not read."""
    notes = NOTES.get()
    if notes is None:
        yield
        return
    number = next(_numbers)
    notes[number] = what
    with jax.named_scope(f"note[{number}]"):
        yield


def read(scope: str, notes: Notes) -> list[Any]:
    """The notes on a place in a program, the outermost first.

    Raises:
      ValueError: for a part of the program that jax traced in an earlier call and kept.
    """
    numbers = [int(number) for number in re.findall(r"note\[(\d+)\]", scope)]
    if not notes.keys() >= set(numbers):
        raise ValueError(
            "a part of tx.update has its own jax.jit and was traced before, so what it sends "
            "cannot be named; explain the transformation without that jax.jit."
        )
    return [notes[number] for number in numbers]
