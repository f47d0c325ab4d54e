"""Mistakes in a config or on the command line: one line each, before anything is compiled."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class UserError(Exception):
    """A mistake of the person who started the run; `train.main` prints it as one line."""


def choose(table: Mapping[str, T], name: str, field: str) -> T:
    """Looks a name from the config up in a table of names.

    Raises:
      UserError: if the table does not hold the name; names the field and the nearest name.
    """
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(f"{field}: there is no {name!r}; {hint}it is one of {', '.join(table)}")


def check_sizes(config: Any, world: int) -> None:
    """Raises if the sizes in a config do not fit each other or the number of devices.

    Args:
      config: a config of `configs/`.
      world: number of devices of all processes.
    """
    for name in ("steps", "batch_size", "microbatches", "eval_every", "measure_steps"):
        if config[name] < 1:
            raise UserError(f"{name} is {config[name]}; it must be at least 1")
    if config.checkpoint.every < 1 or config.checkpoint.keep < 1:
        raise UserError("checkpoint.every and checkpoint.keep must be at least 1")
    size, unit = config.batch_size, world * config.microbatches
    if size % unit:
        lower, upper = size // unit * unit, -(-size // unit) * unit
        raise UserError(
            f"batch_size {size} is not divisible by {world} devices x {config.microbatches} "
            f"microbatches; use {f'{lower} or ' if lower else ''}{upper}"
        )
