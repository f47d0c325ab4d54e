"""Types of arguments; a value that cannot be ends the command with a line, before anything runs."""

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Reader = Callable[[str], Any]


def _number(kind: type, what: str, holds: Callable[[float], bool]) -> Reader:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
        return value

    return read


count = _number(int, "a whole number of at least 1", lambda x: x >= 1)
whole = _number(int, "a whole number of at least 0", lambda x: x >= 0)
values = _number(float, "a number of at least 1, such as 8e6", lambda x: 1 <= x < math.inf)
hundredth = _number(float, "a number of at least 0.01", lambda x: 0.01 <= x < math.inf)
positive = _number(float, "a number above 0", lambda x: 0 < x < math.inf)
share = _number(float, "a number above 0 and at most 1", lambda x: 0 < x <= 1)
at_least_zero = _number(float, "a number of at least 0", lambda x: 0 <= x < math.inf)


def several(of: Reader) -> Reader:
    """What stands between commas."""
    return lambda text: [of(word) for word in text.split(",")]


def one_of(names: Iterable[str]) -> Reader:
    """One of these names."""
    known = tuple(names)

    def read(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"unknown {text!r}; there are {', '.join(known)}")
        return text

    return read


def new_file(text: str) -> Path:
    """A path that can be written: its folder exists."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "is in no folder that exists"
        raise argparse.ArgumentTypeError(f"expected a file to write, but {text!r} {what}")
    return path


def existing_folder(text: str) -> Path:
    """A folder that exists."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder that exists, got {text!r}")
    return Path(text)


def existing_file(text: str) -> Path:
    """A file that can be read."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"expected a file that exists, got {text!r}")
    return Path(text)
