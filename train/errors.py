"""Why a run cannot go on: one line each, and one exit status for each kind.

Status 2: a mistake in the config or on the command line, found before anything is compiled. Status
3: what another start would meet again, such as a full disk. Any other failure ends with its
traceback and status 1; it may be gone after a restart.
"""

import difflib
import errno
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class UserError(Exception):
    """A mistake of the person who started the run; `train.main` prints it as one line."""


class RunError(Exception):
    """A run cannot go on, and would not after a restart; `train.main` prints it as one line."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed for want of space, whichever library reports it."""
    return any(
        getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        or "No space left on device" in str(cause)
        or "Disk quota exceeded" in str(cause)
        for cause in causes(error)
    )


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
