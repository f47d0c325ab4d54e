"""How many of the bytes that a training step sends travel while its backward pass computes.

Read from a scheduled program: a collective is hidden if a kernel of the backward pass is started
between its start and its done. Counted beside it is the stricter measure, where this kernel has to
be a matrix product or a convolution. How long either takes, the program does not say.
"""

import re
from fractions import Fraction
from typing import NamedTuple

import jaxcomm
from gpu_aot.program import Instruction, read_program

_BACKWARD = re.compile(r'op_name="[^"]*transpose\(')
_PRODUCT = re.compile(r'custom_call_target="__cu(?:dnn|blas)|kind=kCustom')

SMALL = 256


class Overlap(NamedTuple):
    """Of one step: the bytes that a device sends on average, and which collectives block.

    Attributes:
      sent: all bytes outside of conditionals, which every step sends.
      hidden: those behind any kernel of the backward pass.
      behind_products: those behind a product or a convolution of it.
      in_conditionals: what steps that take all branches send beside. It is waited for.
      blocking: the collectives outside of conditionals of at least SMALL bytes that have no start
        and done. What is smaller, such as a flag behind all else, the compiler may well send at
        once.
    """

    sent: float
    hidden: float
    behind_products: float
    in_conditionals: float
    blocking: tuple[str, ...]


def overlap(text: str) -> Overlap:
    """Reads `compiled.as_text()` of a training step."""
    program = read_program(text)
    lines = program.computations[program.entry]
    inside = {
        inner.name: line.name
        for line in lines
        if line.op == "async-start"
        for inner in program.computations[line.calls[0]]
    }
    at = {line.name: i for i, line in enumerate(lines)}
    done = {line.operands[0]: i for i, line in enumerate(lines) if line.op.endswith("-done")}
    sent = hidden = behind_products = in_conditionals = Fraction(0)
    blocking = []
    for collective in jaxcomm.wire_report(text).collectives:
        mean = Fraction(sum(collective.sent)) / len(collective.sent) * (collective.times or 0)
        name = inside.get(collective.name, collective.name)
        if collective.branch:
            in_conditionals += mean
            continue
        sent += mean
        if name not in done:
            blocking += [collective.name] if mean >= SMALL else []
            continue
        kernels = [line for line in lines[at[name] : done[name]] if _is_backward(line)]
        hidden += mean if kernels else 0
        behind_products += mean if any(_PRODUCT.search(line.text) for line in kernels) else 0
    amounts = map(float, (sent, hidden, behind_products, in_conditionals))
    return Overlap(*amounts, tuple(blocking))


def _is_backward(line: Instruction) -> bool:
    return line.op in ("fusion", "custom-call") and bool(_BACKWARD.search(line.text))
