"""Reads the bytes on the wire out of a compiled program.

The compiler promotes dtypes, combines collectives and adds some that nobody wrote. So a program's
bytes are read from its optimized text, by a small parser that is below `wire_report`.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

Bytes = int | Fraction
Branch = tuple[tuple[str, int], ...]
_Array = tuple[str, tuple[int, ...], int]  # dtype, shape, bytes

_CURE = "type wire_report(jax.jit(step).lower(*args).compile())"


@dataclass(frozen=True)
class Collective:
    """One collective operation, at one of the places from which a program reaches it.

    Attributes:
        name: the instruction's name in the program.
        op: what it is, such as "all-reduce"; asynchronous forms go by the same name.
        dtypes: of each array that a device puts in, as printed, such as ("u16",).
        shapes: of each array that a device puts in.
        groups: devices that exchange with each other; for a permute, (source, target) pairs.
        group_size: devices in a group, the largest if they differ; 2 for a permute.
        sent: bytes that each device sends in one execution, one entry for each device.
        times: executions in one run of the program, if its branch is taken; None in a loop whose
            trip count is not in the program.
        branch: (conditional, branch) pairs that lead to it, outermost first; () if it always runs.
            Branches count as in `jax.lax.cond`: 0 is the false one, 1 the true one.
        unknown_loops: the loops around it whose trip count is not in the program.
    """

    name: str
    op: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    group_size: int
    sent: tuple[Bytes, ...]
    times: int | None = 1
    branch: Branch = ()
    unknown_loops: tuple[str, ...] = ()


@dataclass(frozen=True)
class WireReport:
    """What each device sends in one run of a compiled program.

    Totals are exact. They count loops by their trips and charge each device, at every conditional,
    with the branch in which it sends most. They raise a ValueError if a trip count is unknown.

    Attributes:
        collectives: every collective that runs, once for each place that it is reached from.
        devices: of the program; device i is the i-th of the mesh's `devices.flat`.
        conditionals: name and number of branches of each conditional that holds collectives.
    """

    collectives: tuple[Collective, ...]
    devices: int
    conditionals: tuple[tuple[str, int], ...] = ()

    @cached_property
    def bytes_per_device(self) -> tuple[Bytes, ...]:
        """Bytes that each device sends."""
        columns = list(zip(*(c.sent for c in self.collectives), strict=True))
        # Most devices send alike, so each distinct column is added up once.
        totals = {column: _exact(self._total(column)) for column in set(columns)}
        return tuple(totals[column] for column in columns) or (0,) * self.devices

    @property
    def bytes_max(self) -> Bytes:
        """Bytes sent by the device that sends most."""
        return max(self.bytes_per_device)

    @property
    def bytes_mean(self) -> Bytes:
        """Bytes sent by a device on average."""
        return _exact(Fraction(sum(self.bytes_per_device)) / self.devices)

    @property
    def rounds(self) -> int:
        """Collective operations that are executed and move data, loops counted by their trips.

        An all-reduce is one of them. A conditional counts as its branch that has most.
        """
        return int(self._total([any(c.sent) for c in self.collectives]))

    @property
    def unknown_loops(self) -> tuple[str, ...]:
        """The loops that hold collectives and whose trip count is not in the program."""
        return tuple(dict.fromkeys(name for c in self.collectives for name in c.unknown_loops))

    def only(self, *ops: str) -> "WireReport":
        """Returns the report of the collectives of these kinds, such as "all-to-all", alone."""
        if unknown := set(ops) - _SHARE.keys():
            raise ValueError(f"{unknown} are no collectives; choose from {sorted(_SHARE)}.")
        return replace(self, collectives=tuple(c for c in self.collectives if c.op in ops))

    def by_branch(self) -> dict[tuple[str, int], "WireReport"]:
        """Returns the report of each (conditional, branch), as if that branch were always taken.

        Other conditionals stay as they are: ask the result for its `by_branch` in turn.
        """
        reports = {}
        for name, branches in self.conditionals:
            others = tuple(pair for pair in self.conditionals if pair[0] != name)
            for i in range(branches):
                taken = (c for c in self.collectives if dict(c.branch).get(name, i) == i)
                reports[name, i] = replace(self, collectives=tuple(taken), conditionals=others)
        return reports

    def as_dict(self) -> dict[str, Any]:
        """Returns lists, dicts and numbers (fractions as floats); no totals if they are unknown."""
        totals = () if self.unknown_loops else ("bytes_max", "bytes_mean", "rounds")
        data = asdict(self) | {name: getattr(self, name) for name in ("unknown_loops", *totals)}
        return json.loads(json.dumps(data, default=float))

    def __str__(self) -> str:
        """A line for each collective, with the bytes of one execution, and one for the total."""
        names = "op", "dtype", "elements", "group", "times", "bytes max", "bytes mean", "branch"
        layout = "{:<20} {:<9} {:>13} {:>5} {:>7} {:>14} {:>14}  {}"
        lines = [layout.format(*row).rstrip() for row in (names, *map(_row, self.collectives))]
        total = f"unknown, as are the trips of {', '.join(self.unknown_loops)}"
        if not self.unknown_loops:
            most, mean = _number(self.bytes_max), _number(self.bytes_mean)
            total = f"a device sends at most {most} bytes, {mean} on average; {self.rounds} rounds"
        return "\n".join([*lines, f"total: {total}"])

    def _total(self, amounts: Sequence[Bytes]) -> Bytes:
        """The sum of one amount per collective, in the branches where it is largest."""
        if self.unknown_loops:
            raise ValueError(
                f"no total: the program does not hold the trip count of {self.unknown_loops}. Use "
                "loops of fixed length (lax.scan), or add up the entries with times=None yourself."
            )
        pairs = zip(self.collectives, amounts, strict=True)
        return _worst([(c.branch, (c.times or 0) * amount) for c, amount in pairs])


# Bytes that a device sends for each byte of its operand, in a group of g devices.
_SHARE: dict[str, Callable[[int], Bytes]] = {
    "all-reduce": lambda g: Fraction(2 * (g - 1), g),
    "all-gather": lambda g: g - 1,  # the result is g operands long
    "reduce-scatter": lambda g: Fraction(g - 1, g),
    "all-to-all": lambda g: Fraction(g - 1, g),
    "ragged-all-to-all": lambda g: min(g - 1, 1),
    "collective-permute": lambda g: min(g - 1, 1),
    "collective-broadcast": lambda g: min(g - 1, 1),
}


def wire_report(compiled: Any) -> WireReport:
    """Says how many bytes each device sends in one run of a compiled program.

    A device in a group of g is charged with what the best algorithm for long messages sends:

        all-reduce            2 (g-1)/g of its operand
        all-gather            (g-1)/g of the result
        reduce-scatter        (g-1)/g of its operand; all-to-all too
        ragged-all-to-all     its operand: a bound, the sizes are known at run time only
        collective-permute    its operand for each pair (this device, another device)
        collective-broadcast  its operand, except the last device: a pipelined chain

    What a custom call or a kernel sends by itself is not in a program's text.

    Args:
        compiled: the result of `jitted.lower(*args).compile()`, or its `as_text()`.

    Returns:
        The report; print it, or read its `bytes_max`, `bytes_mean`, `rounds` and `collectives`.

    Raises:
        TypeError: if the argument is not a compiled program.
        ValueError: if it is another text, or the program sends in a way that is not listed here.

    Example:
        >>> import jax, jaxcomm
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
        >>> step = jax.shard_map(lambda x: jax.lax.pmean(x, "data"),
        ...                      mesh=mesh, in_specs=P("data"), out_specs=P())
        >>> compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((8, 1000), "float32")).compile()
        >>> jaxcomm.wire_report(compiled).bytes_max
        7000
    """
    if not isinstance(compiled, str):
        # A Lowered has `as_text` too, but not yet the collectives that the compiler adds.
        if hasattr(compiled, "compile") or not hasattr(compiled, "as_text"):
            raise TypeError(f"{type(compiled).__name__} is not a compiled program; {_CURE}.")
        compiled = compiled.as_text() or ""
    modules = re.split("^HloModule ", compiled, flags=re.MULTILINE)[1:]
    if len(modules) != 1 or "is_scheduled=true" not in modules[0].partition("\n")[0]:
        kind = "StableHLO" if "func.func" in compiled else "something else"
        raise ValueError(f"expected one compiled HLO program, got {kind}; {_CURE}.")
    header, *lines = modules[0].splitlines()
    counts = re.findall(r"(?:replica_count|num_partitions)=(\d+)", header)
    devices = math.prod(map(int, counts))
    try:
        found, branches = _parse(lines, devices)
    except KeyError as error:
        raise ValueError(f"the program's text is cut: it lacks {error}; {_CURE}.") from error
    holding = dict.fromkeys(name for c in found for name, _ in c.branch)
    return WireReport(tuple(found), devices, tuple((name, branches[name]) for name in holding))


def _worst(amounts: Sequence[tuple[Branch, Bytes]]) -> Bytes:
    """The sum of all amounts, with the largest branch of each conditional."""
    total: Bytes = sum(amount for branch, amount in amounts if not branch)
    conditionals: dict[str, dict[int, list[tuple[Branch, Bytes]]]] = {}
    for branch, amount in amounts:
        if branch:
            (name, i), *inner = branch
            conditionals.setdefault(name, {}).setdefault(i, []).append((tuple(inner), amount))
    return total + sum(max(map(_worst, branches.values())) for branches in conditionals.values())


def _groups(attributes: dict[str, str], devices: int) -> tuple[tuple[int, ...], ...]:
    """The devices that exchange with each other, from any of the forms that are printed."""
    pairs = attributes.get("source_target_pairs")
    printed = pairs or attributes.get("replica_groups", "{}")
    if printed.startswith("mesh"):
        groups = _mesh_groups(printed + attributes.get("device_ids", ""))
    elif printed.startswith("["):  # [4,2]<=[2,4]T(1,0)
        shape, _, order = printed.partition("<=")
        groups = _iota(order).reshape(_ints(shape)).tolist()
    else:
        groups = [ids for part in _split(printed[1:-1]) if (ids := _ints(part))]
        groups = groups if groups or pairs else [list(range(devices))]
    if (top := max(map(max, groups), default=0)) >= devices:
        raise ValueError(f"device {top} sends in a program of {devices} devices; {_CURE}.")
    return tuple(map(tuple, groups))


def _mesh_groups(text: str) -> list[list[int]]:
    """Reads `mesh['a'=2,'b'=4] {'b':(2)2}`: devices whose place differs along those axes only.

    `'b':(2)2` is the part of size 2 of axis b that lies behind a part of size 2. If the devices of
    the mesh are not in order, a list of them comes between the mesh and the axes.
    """
    mesh, _, rest = text.partition("]")
    listed, _, parts = rest.rpartition("{")
    axes = (axis.rpartition("=") for axis in _split(mesh.removeprefix("mesh[")))
    sizes = {axis: int(size) for axis, _, size in axes}
    places = np.arange(math.prod(sizes.values()))
    outside, group_size = places.copy(), 1
    for part in _split(parts.rstrip("}")):
        axis, _, sub = part.partition(":(")
        before, size = _ints(sub) or (1, sizes[axis])
        behind = list(sizes.values())[list(sizes).index(axis) + 1 :]
        stride = math.prod(behind) * sizes[axis] // (before * size)
        outside -= places // stride % size * stride
        group_size *= size
    devices = _iota(listed).ravel() if "[" in listed else np.array(_ints(listed) or places)
    return devices[np.argsort(outside, kind="stable")].reshape(-1, group_size).tolist()


def _iota(text: str) -> np.ndarray:
    """0, 1, 2, ... as `[4,2]T(1,0)` orders them: in that shape, transposed."""
    shape, order = map(_ints, (text.partition("T")[::2]))
    return np.arange(math.prod(shape)).reshape(shape).transpose(order or range(len(shape)))


def _ints(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


_HEAD = re.compile(r"(ENTRY )?%?(\S+) (?:\(.*)?{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([a-z][\w-]*)(\(.*)")
_ARRAY = re.compile(r"(\w+)\[([^]]*)](?:{([^}]*)})?")
_TOKEN = re.compile(r""""[^"\\]*(?:\\.[^"\\]*)*"|'[^']*'|[()\[\]{},]""")
_CALLERS = {  # the attributes that name the computations which an instruction runs
    "while": ("condition", "body"),
    "conditional": ("branch_computations", "false_computation", "true_computation"),
    "call": ("to_apply",),
    "fusion": ("calls",),
    "async": ("calls",),
    "custom-call": ("calls", "called_computations"),
}


def _parse(lines: list[str], devices: int) -> tuple[list[Collective], dict[str, int]]:
    """What the entry computation executes, and the number of branches of each conditional."""
    entry, shapes, steps = "", {}, []
    inside: dict[str, list[Collective]] = {}
    branches: dict[str, int] = {}
    for line in lines:
        if found := _INSTRUCTION.match(line):
            name, shapes[name], op, rest = found.groups()
            op = op.removesuffix("-start")  # asynchronous; its -done sends nothing more
            if op in _SHARE or op in _CALLERS:
                operands, *parts = _split(rest)
                attributes = {k: value for k, _, value in (part.partition("=") for part in parts)}
                if op in _SHARE:
                    arrays = list(_arrays(operands, shapes))
                    steps.append(_collective(name, op, arrays, attributes, devices))
                else:
                    called, branches[name] = _called(name, op, attributes, inside)
                    steps += called
            elif op == "send" and "is_host_transfer=true" not in rest:
                raise ValueError(f"{name} sends from device to device, which is not supported.")
        elif head := _HEAD.match(line.strip()):
            shapes, steps = {}, []
            inside[head[2]] = steps
            entry = head[2] if head[1] else entry
    return inside[entry], branches


def _called(
    name: str, op: str, attributes: dict[str, str], inside: dict[str, list[Collective]]
) -> tuple[list[Collective], int]:
    """What an instruction executes in the computations that it calls, and their number."""
    callees = re.findall(r"[^\s%,{}]+", " ".join(attributes.get(k, "") for k in _CALLERS[op]))
    # The configuration is JSON, in some versions inside of a string.
    config = re.sub(r"[\\\s]", "", attributes.get("backend_config", ""))
    known = re.search(r'"known_trip_count":{"n":"?(\d+)', config)
    loop: tuple[str, ...] = (name,) if op == "while" and not known else ()
    found = []
    for i, callee in enumerate(callees):
        branch: Branch = ((name, i),) if op == "conditional" else ()
        # A loop's condition, which comes first, runs once more to end it.
        n = int(known[1]) + (i == 0) if op == "while" and known else 1
        for c in inside[callee]:  # callees are printed before their callers
            times = None if loop or c.times is None else n * c.times
            path, loops = branch + c.branch, loop + c.unknown_loops
            found.append(replace(c, times=times, branch=path, unknown_loops=loops))
    return found, len(callees)


def _collective(
    name: str, op: str, arrays: list[_Array], attributes: dict[str, str], devices: int
) -> Collective:
    if "slice_sizes" in attributes or attributes.get("has_dynamic_root") == "true":
        raise ValueError(f"{name} is a form of {op} that is not supported.")
    # The other operands of a ragged-all-to-all are its result and sizes.
    arrays = arrays[:1] if op == "ragged-all-to-all" else arrays
    dtypes, dims, nbytes = zip(*arrays, strict=True)
    groups = _groups(attributes, devices)
    sent: list[Bytes] = [0] * devices
    for group in groups:
        # A permute's group is (source, target), and nothing moves if these are the same.
        last = len(set(group)) - 1 if op in ("collective-permute", "collective-broadcast") else None
        for device in group[:last]:
            sent[device] += _SHARE[op](len(group)) * sum(nbytes)
    size = max(map(len, groups), default=0)
    return Collective(name, op, dtypes, dims, groups, size, tuple(map(_exact, sent)))


def _arrays(operands: str, shapes: dict[str, str]) -> Iterator[_Array]:
    """Reads `(%a, f32[8]{0} %b)`; a shape is printed there or with the operand's definition."""
    plain = re.sub(r"/\*.*?\*/", "", operands[1:-1])
    named = (operand.rpartition(" ") for operand in _split(plain))
    found = " ".join(shape or shapes[name.removeprefix("%")] for shape, _, name in named)
    for dtype, dims, layout in _ARRAY.findall(found):
        number = re.match(r"[a-z]+(\d+)", dtype.replace("pred", "u8"))
        if number is None:
            raise ValueError(f"the program sends an array of unknown dtype {dtype!r}.")
        # Elements of fewer than 8 bits fill a byte each, unless the layout packs them: `E(4)`.
        packed = re.search(r"E\((\d+)\)", layout)
        bits = int(packed[1]) if packed else max(8, int(number[1]))
        lengths = tuple(_ints(dims))
        yield dtype, lengths, -(-math.prod(lengths) * bits // 8)


def _split(text: str) -> list[str]:
    """Splits at the commas outside of brackets and quotes; empty parts are dropped."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token[0] == "," and depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    if depth:
        raise ValueError(f"the program's text is cut: a bracket stays open in {text[:60]!r}.")
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def _row(c: Collective) -> tuple[str, ...]:
    elements, mean = sum(map(math.prod, c.shapes)), Fraction(sum(c.sent)) / len(c.sent)
    numbers = map(_number, (elements, c.group_size, c.times, max(c.sent), mean))
    branch = " ".join(f"{name}[{i}]" for name, i in c.branch)
    return c.op, "+".join(dict.fromkeys(c.dtypes)), *numbers, branch


def _number(amount: Bytes | None) -> str:
    return "unknown" if amount is None else f"{float(amount):,.1f}".removesuffix(".0")


def _exact(amount: Bytes) -> Bytes:
    return int(amount) if amount == int(amount) else amount
