"""Options that are given as a name or as an object."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def from_table(
    option: Any, table: Mapping[str, Callable[[], Kind]], kind: type[Kind], what: str, example: str
) -> Kind:
    """The object with that name and its defaults; an object of the kind is returned as it is.

    Args:
      option: what the user passed.
      table: a table from names to factories.
      kind: the base class of what factories make.
      what: how users call the kind, such as "codec".
      example: a call of a factory, such as "jaxcomm.codecs.bfloat16()".

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything that is neither a name nor of the kind.
    """
    if isinstance(option, kind):
        return option
    names = ", ".join(table)
    if not isinstance(option, str):
        name = getattr(option, "__name__", None)
        if name in table:  # the factory itself, or a dtype
            example = f"{example.rpartition('.')[0]}.{name}()"
        raise TypeError(
            f"{what} must be a name ({names}) or what a factory returns, got {option!r}; "
            f"a factory must be called: {example}."
        )
    if option not in table:
        near = difflib.get_close_matches(option.lower(), table, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"unknown {what} {option!r}; choose one of {names}{hint}")
    return table[option]()
