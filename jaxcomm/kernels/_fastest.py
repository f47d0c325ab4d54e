"""The implementation that was fastest where operations were timed: what None stands for.

`fastest.json` lists it by compute capability, operation and size. `python -m benchmarks.tables`
writes the file from the measurements of `python -m benchmarks.kernels`.
"""

import functools
import json
import math
from pathlib import Path

from jaxcomm.kernels import _device

FILE = Path(__file__).with_name("fastest.json")


@functools.cache
def _table() -> dict[str, dict[str, list[tuple[int, str]]]]:
    """Compute capability -> operation -> sizes in elements, and the fastest at each."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def fastest(operation: str, elements: int) -> str | None:
    """The fastest implementation at the nearest size that was timed; None where none was."""
    capability = _device.capability()
    name = "" if capability is None else "{}.{}".format(*capability)
    timed = _table().get(name, {}).get(operation, [])
    if not timed or elements < 1:
        return None
    return min(timed, key=lambda row: abs(math.log(row[0] / elements)))[1]
