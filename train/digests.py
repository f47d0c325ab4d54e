"""Digests of the files in a folder, which show damage before anything is read from it."""

import json
import zlib
from pathlib import Path

from train.workdir import write_whole

FILE = "digests.json"


def seal(folder: Path) -> None:
    """Writes size and CRC-32 of every file in the subfolders of a folder into one more file."""
    table = {str(path.relative_to(folder)): _digest(path) for path in _files(folder)}
    write_whole(folder / FILE, json.dumps(table, indent=1, sort_keys=True) + "\n")


def has(folder: Path, file: Path) -> bool:
    """Whether a file of a folder was sealed; also if nobody can say, as the digests are damaged."""
    try:
        return str(file) in json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return True


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder, in a few words; None if no bit has changed."""
    try:
        table = json.loads((folder / FILE).read_text())
    except FileNotFoundError:
        return f"{FILE} is missing"
    except ValueError:
        return f"{FILE} is cut"
    except OSError as error:
        return f"{FILE} cannot be read: {error.strerror}"
    if not isinstance(table, dict):
        return f"{FILE} is no table"
    for name, (size, checksum) in table.items():
        try:
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if _digest(folder / name) != [size, checksum]:
                return f"{name} has other bytes than were written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/**/*") if path.is_file())


def _digest(path: Path) -> list[int]:
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return [size, checksum]
