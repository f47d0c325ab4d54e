"""What the kernels of a compiled program read from memory and write to it.

Ahead of time the compiler has no cost analysis, so this adds up the operands and the results of
each kernel. What a kernel reads twice is counted once: that stays in its registers or its cache.
"""

import re
from typing import NamedTuple

from benchmarks.aot.program import Instruction, Program

# These move nothing: they name a value, or parts of one.
FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all"}
_PARTS = {"slice", "dynamic-slice", "gather"}  # read as much as they return of their first operand
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is what is new
_NAMES = {"bitcast", "reshape", "copy", "convert"}  # of a parameter, looked through inside a kernel


class Kernel(NamedTuple):
    """One kernel: its name, and the bytes that it reads and writes."""

    name: str
    read: int
    written: int


def kernels(program: Program, computation: str = "") -> list[Kernel]:
    """The kernels of a program, those in loops and branches once each."""
    lines = program.computations[computation or program.entry]
    sizes = {line.name: line.nbytes for line in lines}
    found = []
    for line in lines:
        if line.op in ("while", "conditional", "call"):
            found += [kernel for name in line.calls for kernel in kernels(program, name)]
        elif line.op in ("fusion", "fusion-start"):
            found.append(_fusion(line, program.computations[line.calls[0]], sizes))
        elif line.op == "dynamic-update-slice":
            update = sizes[line.operands[1]]
            found.append(Kernel(line.name, update, update))
        elif line.op in _PARTS:
            rest = sum(sizes[name] for name in set(line.operands[1:]))
            found.append(Kernel(line.name, line.nbytes + rest, line.nbytes))
        elif line.op not in FREE and not line.op.endswith("-done"):
            read = sum(sizes[name] for name in set(line.operands))
            found.append(Kernel(line.name, read, line.nbytes))
    return found


def moved(program: Program) -> int:
    """Bytes that all kernels together read and write."""
    return sum(kernel.read + kernel.written for kernel in kernels(program))


def _fusion(line: Instruction, inside: list[Instruction], sizes: dict[str, int]) -> Kernel:
    by_name = {inner.name: inner for inner in inside}
    root = next(inner for inner in inside if inner.is_root)
    results = [by_name[name] for name in root.operands] if root.op == "tuple" else [root]
    parameters = {
        int(re.match(r"\d+", inner.text)[0]): inner for inner in inside if inner.op == "parameter"
    }
    read = written = 0
    updated = set()
    for result in results:
        while result.op in ("bitcast", "copy") and result.operands[0] in by_name:
            result = by_name[result.operands[0]]
        if result.op in _UPDATES:  # in place: only what is new is written
            written += by_name[result.operands[_UPDATES[result.op]]].nbytes
            updated.add(_origin(result.operands[0], by_name))
        else:
            written += result.nbytes
    shares: dict[str, float] = {}
    for number, name in enumerate(line.operands):
        if parameters[number].name not in updated:
            read += round(sizes[name] * _share(parameters[number].name, by_name, shares))
    return Kernel(line.name, read, written)


def _origin(name: str, by_name: dict[str, Instruction]) -> str:
    while by_name[name].op in _NAMES:
        name = by_name[name].operands[0]
    return name


def _share(name: str, by_name: dict[str, Instruction], known: dict[str, float]) -> float:
    """Which share of a value a kernel looks at: less than all, if only parts are made of it."""
    if name not in known:
        known[name] = min(
            1.0, sum(_share_of_user(name, user, by_name, known) for user in by_name.values())
        )
    return known[name]


def _share_of_user(
    name: str, user: Instruction, by_name: dict[str, Instruction], known: dict[str, float]
) -> float:
    if name not in user.operands:
        return 0.0
    is_part = user.op in _PARTS and name not in user.operands[1:]
    elements = by_name[name].elements
    if user.op == "tuple" or not (is_part or user.elements == elements):
        return 1.0
    return user.elements / elements * (1.0 if user.is_root else _share(user.name, by_name, known))
