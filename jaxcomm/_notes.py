"""Notes attached to collectives while tracing; `jaxcomm.explain` reads them back."""

import contextlib
import contextvars
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax


class Message(NamedTuple):
    """What the collectives of a part of a program send.

    Attributes:
      name: "bucket", "exempt", "gathered", "gradient", or of a method's own: "squares" of
        `factored_adam`, "dense" and "small" of `one_bit_adam`.
      leaves: the leaves, as numbers of the layout or as paths.
    """

    name: str
    leaves: tuple[Any, ...]


NOTES: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("notes", default=None)


@contextlib.contextmanager
def noted(what: Any) -> Iterator[None]:
    """A note on all that is traced here; nothing where nobody reads notes."""
    notes = NOTES.get()
    if notes is None:
        yield
        return
    notes.append(what)
    with jax.named_scope(f"note[{len(notes) - 1}]"):
        yield


def read(scope: str, notes: list[Any]) -> list[Any]:
    """The notes on a place in a program, the outermost first."""
    return [notes[int(number)] for number in re.findall(r"note\[(\d+)\]", scope)]
