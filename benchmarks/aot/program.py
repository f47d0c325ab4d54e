"""A compiled program as a list of instructions, in the order in which they are started."""

import math
import re
from dataclasses import dataclass, field

_HEAD = re.compile(r"(ENTRY )?%?(\S+) (?:\(.*)?{$")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?(\S+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|\w+_computations?|called_computations)=({[^}]*}|%?[\w.\-]+)"
)


@dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
      name: of its result.
      op: what it is, such as "fusion" or "all-reduce-start".
      shape: of its result, as printed.
      operands: the names of what it reads.
      calls: the computations that it calls.
      text: what is printed after the operation's name.
      is_root: whether it is the result of its computation.
    """

    name: str
    op: str
    shape: str
    operands: tuple[str, ...]
    calls: tuple[str, ...]
    text: str
    is_root: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the result, all its parts together."""
        return bytes_of(self.shape)

    @property
    def elements(self) -> int:
        """Elements of the result, all its parts together."""
        return sum(_count(dims) for _, _, dims in _ARRAY.findall(self.shape))


@dataclass
class Program:
    """The computations of a program by name, and which of them is run."""

    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    entry: str = ""


def bytes_of(shape: str) -> int:
    """Bytes of all arrays in a printed shape."""
    return sum(
        _count(dims) * max(int(bits or 8) // 8, 1) for _, bits, dims in _ARRAY.findall(shape)
    )


def _count(dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n)


def read_program(text: str) -> Program:
    """Reads `compiled.as_text()`."""
    program, inside = Program(), []
    # Every fifth part of a long tuple is numbered in a comment.
    for line in re.sub(r"/\*index=\d+\*/", "", text).splitlines():
        if found := _INSTRUCTION.match(line):
            root, name, shape, op, rest = found.groups()
            operands = tuple(re.findall(r"%([\w.\-]+)", rest.partition(")")[0]))
            calls = tuple(re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(rest))))
            inside.append(Instruction(name, op, shape, operands, calls, rest, bool(root)))
        elif head := _HEAD.match(line.strip()):
            inside = program.computations.setdefault(head[2], [])
            program.entry = head[2] if head[1] else program.entry
    return program
