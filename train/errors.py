"""Why a run cannot continue: one line each, and an exit status for each kind.

Status 2: a mistake in the config or on the command line, found before anything is compiled. Status
3: an error that would recur after a restart, such as a full disk. Any other failure ends with its
traceback and status 1; it may be gone after a restart.
"""

import contextlib
import difflib
import errno
import re
from collections.abc import Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")
_TRANSPORT = re.compile(r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED):")


class UserError(Exception):
    """A user's mistake; `train.main` prints it as one line."""


class RunError(Exception):
    """A run cannot continue; `train.main` prints it as one line.

    Args:
      message: the line to print.
      status: the exit status: 3, or 1 if a restart may help.
    """

    def __init__(self, message: str, status: int = 3):
        super().__init__(message)
        self.status = status


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed for lack of space, whichever library reports it."""
    return any(
        getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        or "No space left on device" in str(cause)
        or "Disk quota exceeded" in str(cause)
        for cause in causes(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or this machine ran out of memory."""
    return any(
        isinstance(cause, MemoryError) or "RESOURCE_EXHAUSTED: Out of memory" in str(cause)
        for cause in causes(error)
    )


def of_another_process(error: BaseException) -> str | None:
    """What jax says of a message that failed because the other process has ended; else None.

    jax raises it as a ValueError, as it does for users' mistakes.
    """
    said = (str(cause).split("\n")[0] for cause in causes(error))
    return next((line for line in said if _TRANSPORT.match(line)), None)


def damaged_file(error: BaseException) -> str | None:
    """What ArrayRecord says of a file that it cannot read; None for any other error."""
    said = (str(cause).split("\n")[0] for cause in causes(error))
    return next((line for line in said if "ArrayRecord file" in line or "Riegeli" in line), None)


@contextlib.contextmanager
def memory_for(what: str, cure: str) -> Iterator[None]:
    """Surrounds work that may run out of memory, and says which field reduces its need.

    Raises:
      RunError: if memory runs out, with the cure.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        first = str(error).split("\n")[0]
        raise RunError(f"there is not enough memory for {what}: {cure} ({first})") from error


def choose(table: Mapping[str, T], name: str, field: str) -> T:
    """Looks up a name from the config in a table of names.

    Raises:
      UserError: if the table does not hold the name; names the field and the nearest name.
    """
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(f"{field}: there is no {name!r}; {hint}it is one of {', '.join(table)}")
