"""Describes in one line what is wrong with a config file or its flags, from what was raised.

A config is the user's program and may raise anything; its file and line are then named.
ml_collections raises for fields that a config does not have.
"""

import re
import sysconfig
import traceback
from pathlib import Path
from typing import NamedTuple

import ml_collections

MOST = 200  # Characters of what an exception says.
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
FRAME = re.compile(r'File "(.+)", line (\d+), in .*\n *(.*)')


class Frame(NamedTuple):
    """A line of a traceback."""

    file: str
    line: int | None
    source: str | None


def mistake_in(error: Exception) -> str:
    """The line for an exception of any kind."""
    if isinstance(error, SyntaxError):
        return f"--config: {error.filename}, line {error.lineno}: {error.msg}"
    # A missing field in the file is raised again later, chained to the first error.
    first = error.__cause__ if isinstance(error.__cause__, OSError) else error
    stack = traceback.extract_tb(first.__traceback__)
    frames = [Frame(f.filename, f.lineno, f.line) for f in stack]
    where, text = _where(frames), _last_line(str(first))
    if (field := _missing_field(first, frames)) is not None:
        return f"{where}{field}" if where else field
    if where:
        return f"{where}{type(first).__name__}: {text}"
    if isinstance(error, AttributeError) and "get_config" in text:
        return "--config: the file has no function get_config(), so it is no config"
    if "returned None" in text or "NoneType" in text:
        return "--config: get_config() returns nothing"
    if isinstance(error, OSError):
        return f"--config: {_last_line(str(error))}"
    return f"--config: {type(error).__name__}: {text}"


def mistake_in_traceback(text: str) -> str:
    """The line for a TypeError or ValueError, which absl turns into a text with the traceback."""
    frames = [Frame(file, int(line), source) for file, line, source in FRAME.findall(text)]
    last = _last_line(text)
    own = _own(frames)
    # A config that refuses what follows its name needs no more explanation.
    if last.startswith("ValueError: ") and (own is None or (own.source or "").startswith("raise ")):
        return f"--config: {last.removeprefix('ValueError: ')}"
    return f"{_where(frames) or '--config: '}{last}"


def _own(frames: list[Frame]) -> Frame | None:
    """The innermost line in a file of the user, after the frames that read the config."""
    readers = [i for i, f in enumerate(frames) if f.file.endswith("config_flags.py")]
    behind = frames[readers[-1] + 1 :] if readers else []
    own = [f for f in behind if not f.file.startswith((*LIBRARIES, "<"))]
    return own[-1] if own else None


def _where(frames: list[Frame]) -> str:
    own = _own(frames)
    return f"--config: {own.file}, line {own.line}: " if own else ""


def _missing_field(error: BaseException, frames: list[Frame]) -> str | None:
    """What ml_collections says of a missing field, perhaps with a hint."""
    library = str(Path(ml_collections.__file__).parent)
    if not isinstance(error, AttributeError | KeyError) or not error.args:
        return None
    if not frames or not frames[-1].file.startswith(library):
        return None
    inner = error.args[0].args[0] if isinstance(error.args[0], KeyError) else error.args[0]
    # Followed by all other fields if the config is locked.
    found = re.match(r"""(?:Key "(.+?)" does not exist|'(.+?)'(?:\n|$))""", str(inner))
    if found is None:
        return None
    hint = re.search(r"^Did you mean .*", str(inner), re.MULTILINE)
    field = f"the config has no field {found[1] or found[2]!r}."
    return f"{field} {hint[0]}" if hint else field


def _last_line(text: str) -> str:
    last = text.strip().splitlines()[-1].strip() if text.strip() else ""
    return last if len(last) <= MOST else f"{last[:MOST]} ..."
