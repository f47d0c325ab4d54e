"""A small parser of optimized HLO text: which collectives a program executes, and where."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from jaxcomm import _branches
from jaxcomm._branches import NamedBranch
from jaxcomm.wire._report import SHARE, Branch, Bytes, Collective, exact

_Array = tuple[str, tuple[int, ...], int]  # dtype, shape, bytes

CURE = "type wire_report(jax.jit(step).lower(*args).compile())"


_HEAD = re.compile(r"(ENTRY )?%?(\S+) (?:\(.*)?{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([a-z][\w-]*)(\(.*)")
_ARRAY = re.compile(r"(\w+)\[([^]]*)](?:{([^}]*)})?")
_TOKEN = re.compile(r""""[^"\\]*(?:\\.[^"\\]*)*"|'[^']*'|[()\[\]{},]""")
_CALLERS = {"while", "conditional", "call", "fusion", "async", "custom-call"}
_CALLED = (  # attributes that name the computations that an instruction runs
    "condition",
    "body",
    "branch_computations",
    "false_computation",
    "true_computation",
    "to_apply",
    "calls",
    "called_computations",
)


def parse(
    lines: list[str], devices: int
) -> tuple[list[Collective], dict[str, int], list[NamedBranch]]:
    """What the entry computation executes, and each conditional's number of branches and names."""
    entry, shapes, steps, names = "", {}, [], []
    inside: dict[str, list[Collective]] = {}
    branches: dict[str, int] = {}
    for line in lines:
        if found := _INSTRUCTION.match(line):
            name, shapes[name], op, rest = found.groups()
            op = op.removesuffix("-start")  # asynchronous; its -done sends nothing more
            if op in SHARE or op in _CALLERS:
                operands, *parts = _split(rest)
                attributes = {k: value for k, _, value in (part.partition("=") for part in parts)}
                if op in SHARE:
                    arrays = list(_arrays(operands, shapes))
                    steps.append(_collective(name, op, arrays, attributes, devices))
                else:
                    found = re.search(r'op_name="([^"]*)"', attributes.get("metadata", ""))
                    made_at = found[1] if found else ""
                    here = _branches.read(name, made_at)
                    if op == "while" and (here or _branches.is_once(made_at)):
                        op = "conditional" if here else "once"
                    called, branches[name] = _called(name, op, attributes, inside)
                    steps += called
                    names += here if op == "conditional" else []
            elif op == "send" and "is_host_transfer=true" not in rest:
                raise ValueError(f"{name} sends from device to device, which is not supported.")
        elif head := _HEAD.match(line.strip()):
            shapes, steps = {}, []
            inside[head[2]] = steps
            entry = head[2] if head[1] else entry
    return inside[entry], branches, names


def _called(
    name: str, op: str, attributes: dict[str, str], inside: dict[str, list[Collective]]
) -> tuple[list[Collective], int]:
    """What an instruction executes in the computations that it calls, and their number."""
    callees = re.findall(r"[^\s%,{}]+", " ".join(attributes.get(k, "") for k in _CALLED))
    # The configuration is JSON, in some versions inside a string.
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
            sent[device] += SHARE[op](len(group)) * sum(nbytes)
    size = max(map(len, groups), default=0)
    return Collective(name, op, dtypes, dims, groups, size, tuple(map(exact, sent)))


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
    """Splits at the commas outside brackets and quotes; empty parts are dropped."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token[0] == "," and depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    if depth:
        raise ValueError(f"the program's text is cut: a bracket stays open in {text[:60]!r}.")
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


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
        raise ValueError(f"device {top} sends in a program of {devices} devices; {CURE}.")
    return tuple(map(tuple, groups))


def _mesh_groups(text: str) -> list[list[int]]:
    """Reads `mesh['a'=2,'b'=4] {'b':(2)2}`: devices whose places differ along those axes only.

    `'b':(2)2` is the part of size 2 of axis b that follows a part of size 2. If the devices of the
    mesh are not in order, a list of them comes between the mesh and the axes.
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
