"""Standard streams without a reader, or closed ones: a run outlives its terminal."""

import errno
import io
import os
import sys
from typing import Any, TextIO

_UNREAD = (errno.EPIPE, errno.EIO)  # of a pipe without a reader, and of a terminal that is gone


def open_closed() -> None:
    """Opens the null device for standard streams that the parent has closed.

    Otherwise the next file or pipe would get the number of one, and receive what is printed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)


def outlive_readers() -> None:
    """Drops what is printed after its reader, such as `head`, has gone, instead of failing."""
    sys.stdout, sys.stderr = _surviving(sys.stdout, 1), _surviving(sys.stderr, 2)


def keep_stdout() -> None:
    """Keeps standard output for Python: Gloo prints a line there for every group of processes."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)


class _WhileRead(io.FileIO):
    """A file that accepts everything, also when it has no reader any more."""

    def write(self, data: Any, /) -> int:
        """See `io.FileIO`."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _UNREAD:
                raise
            return len(data)


def _surviving(stream: TextIO, descriptor: int) -> TextIO:
    file = io.BufferedWriter(_WhileRead(os.dup(descriptor), "w"))
    # A name that the terminal cannot show is no reason to fail.
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    return io.TextIOWrapper(file, stream.encoding, errors, line_buffering=True)
