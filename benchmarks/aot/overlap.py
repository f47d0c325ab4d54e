"""How many of the bytes that a training step sends travel while its backward pass computes.

Read from a scheduled program: a collective is hidden if a kernel of the backward pass is started
between its start and its done. Counted beside it is the stricter measure, where this kernel has to
be a matrix product or a convolution. How long either takes, the program does not say. What a loop
sends counts as often as the loop goes round, and stands behind what the same round computes; what
is sent around a loop stands behind all that the loop computes.
"""

import re
from fractions import Fraction
from typing import NamedTuple

import jaxcomm
from benchmarks.aot.program import Instruction, Program, read_program

_BACKWARD = re.compile(r'op_name="[^"]*transpose\(')
_PRODUCT = re.compile(r'custom_call_target="__cu(?:dnn|blas)|kind=kCustom')
_EXCHANGE = re.compile(r'op_name="[^"]*jaxcomm\.exchange')

SMALL = 256


class Overlap(NamedTuple):
    """Of one step: the bytes that a device sends on average, and which collectives block.

    Attributes:
      sent: all bytes outside of conditionals, which every step sends.
      hidden: those behind any kernel of the backward pass.
      behind_products: those behind a product or a convolution of it.
      in_conditionals: what steps that take all branches send beside. It is waited for.
      blocking: the collectives outside of conditionals of at least SMALL bytes that have no start
        and done. What is smaller, such as a flag after all else, the compiler may well send at
        once.
    """

    sent: float
    hidden: float
    behind_products: float
    in_conditionals: float
    blocking: tuple[str, ...]


def overlap(text: str, report: jaxcomm.WireReport | None = None) -> Overlap:
    """Reads `compiled.as_text()` of a training step.

    Args:
      text: the program.
      report: which of its collectives count, such as those along one axis; None is all.
    """
    program, report = read_program(text), report or jaxcomm.wire_report(text)
    windows = _windows(program)
    sent = hidden = behind_products = in_conditionals = Fraction(0)
    blocking = []
    for collective in report.collectives:
        mean = Fraction(sum(collective.sent)) / len(collective.sent) * (collective.times or 0)
        if collective.branch:
            in_conditionals += mean
            continue
        sent += mean
        if collective.name not in windows:
            blocking += [collective.name] if mean >= SMALL else []
            continue
        kernels = _kernels(windows[collective.name], program)
        hidden += mean if kernels else 0
        behind_products += mean if any(_PRODUCT.search(line.text) for line in kernels) else 0
    amounts = map(float, (sent, hidden, behind_products, in_conditionals))
    return Overlap(*amounts, tuple(blocking))


def _windows(program: Program) -> dict[str, list[Instruction]]:
    """By the name of a collective: what is started between its start and its done."""
    windows = {}
    for lines in program.computations.values():
        at = {line.name: i for i, line in enumerate(lines)}
        for i, done in enumerate(lines):
            if not (done.op.endswith("-done") and done.operands and done.operands[0] in at):
                continue
            start = lines[at[done.operands[0]]]
            inner = program.computations[start.calls[0]] if start.op == "async-start" else [start]
            windows |= {line.name: lines[at[start.name] : i] for line in inner}
    return windows


def _kernels(lines: list[Instruction], program: Program) -> list[Instruction]:
    """The kernels of the backward pass among these instructions and in the loops among them."""
    found = []
    for line in lines:
        if line.op == "while":
            for name in line.calls:
                found += _kernels(program.computations[name], program)
        elif line.op in ("fusion", "custom-call") and _BACKWARD.search(line.text):
            found += [] if _EXCHANGE.search(line.text) else [line]
    return found
