"""What each device sends in one run of a program, and how it is added up and shown."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from jaxcomm._branches import NamedBranch

Bytes = int | Fraction
Branch = tuple[tuple[str, int], ...]

# Bytes that a device sends for each byte of its operand, in a group of g devices.
SHARE: dict[str, Callable[[int], Bytes]] = {
    "all-reduce": lambda g: Fraction(2 * (g - 1), g),
    "all-gather": lambda g: g - 1,  # the result is g times the operand
    "reduce-scatter": lambda g: Fraction(g - 1, g),
    "all-to-all": lambda g: Fraction(g - 1, g),
    "ragged-all-to-all": lambda g: min(g - 1, 1),
    "collective-permute": lambda g: min(g - 1, 1),
    "collective-broadcast": lambda g: min(g - 1, 1),
}


@dataclass(frozen=True)
class Collective:
    """One collective operation, at one of the places from which a program reaches it.

    Attributes:
        name: the instruction's name in the program.
        op: what it is, such as "all-reduce"; asynchronous forms go by the same name.
        dtypes: the dtype of each array that a device contributes, as printed, such as ("u16",).
        shapes: the shape of each array that a device contributes.
        groups: devices that exchange with each other; for a permute, (source, target) pairs.
        group_size: devices in a group, the largest if they differ; 2 for a permute.
        sent: bytes that each device sends in one execution, one entry for each device.
        times: executions in one run of the program, if its branch is taken; None in a loop whose
            trip count is not in the program.
        branch: (conditional, branch) pairs that lead to it, outermost first; () if it always runs.
            Branches count as in `jax.lax.switch`; of a `jax.lax.cond`, 0 is the false one.
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

    Totals are exact. They multiply loops by their trip counts and charge each device, at every
    conditional, with the branch in which it sends most. They raise a ValueError if a trip count is
    unknown.

    Attributes:
        collectives: every collective that runs, once for each place that it is reached from.
        devices: the program's number of devices; device i is the i-th of the mesh's `devices.flat`.
        conditionals: name and number of branches of each conditional that holds collectives.
        named: the branches of these conditionals that jaxcomm has named. The names are metadata,
            which jax's persistent compilation cache ignores: a cached program may have older names.
    """

    collectives: tuple[Collective, ...]
    devices: int
    conditionals: tuple[tuple[str, int], ...] = ()
    named: tuple[NamedBranch, ...] = ()

    @cached_property
    def bytes_per_device(self) -> tuple[Bytes, ...]:
        """Bytes that each device sends."""
        columns = list(zip(*(c.sent for c in self.collectives), strict=True))
        # Most devices send alike, so each distinct column is added up once.
        totals = {column: exact(self._total(column)) for column in set(columns)}
        return tuple(totals[column] for column in columns) or (0,) * self.devices

    @property
    def bytes_max(self) -> Bytes:
        """Bytes sent by the device that sends most."""
        return max(self.bytes_per_device)

    @property
    def bytes_mean(self) -> Bytes:
        """Bytes sent by a device on average."""
        return exact(Fraction(sum(self.bytes_per_device)) / self.devices)

    def bytes_between(self, hosts: Sequence[int]) -> Bytes:
        """Returns the bytes that leave a host, of the host that sends most.

        Permutes and all-to-alls count by their pairs of devices. All other collectives are assumed
        to go around a ring that enters and leaves each host once, as NCCL's do.

        Args:
            hosts: the host of each device, such as `[d.process_index for d in mesh.devices.flat]`
                if every process has a host to itself.

        Raises:
            ValueError: for another number of devices.
        """
        if len(hosts) != self.devices:
            raise ValueError(
                f"bytes_between takes the host of each of the {self.devices} devices, got "
                f"{len(hosts)}; write [d.process_index for d in mesh.devices.flat]."
            )
        totals = (
            self._total([_leaving(c, hosts, host) for c in self.collectives]) for host in set(hosts)
        )
        return exact(max(totals))

    @property
    def rounds(self) -> int:
        """Collective operations that are executed and move data, loops counted by their trips.

        An all-reduce or an all-to-all counts as one, however many messages the backend makes of it.
        A conditional counts as its branch with the most operations.
        """
        return int(self._total([any(c.sent) for c in self.collectives]))

    @property
    def unknown_loops(self) -> tuple[str, ...]:
        """The loops that hold collectives and whose trip count is not in the program."""
        return tuple(dict.fromkeys(name for c in self.collectives for name in c.unknown_loops))

    def only(self, *ops: str) -> "WireReport":
        """Returns the report of only the collectives of these kinds, such as "all-to-all"."""
        if unknown := set(ops) - SHARE.keys():
            raise ValueError(f"{unknown} are not collectives; choose from {sorted(SHARE)}.")
        return replace(self, collectives=tuple(c for c in self.collectives if c.op in ops))

    def by_axes(self, mesh: Any) -> dict[tuple[str, ...], "WireReport"]:
        """Returns a report for each axis of a mesh, or set of axes, along which collectives run.

        The key of a collective holds the axes along which its devices differ. With a mesh of
        ("hosts", "devices"), the entry ("hosts",) is what is sent between hosts alone, and the
        entry ("hosts", "devices") is what is sent in collectives over all devices.

        Args:
            mesh: the mesh that the program was compiled for.

        Raises:
            ValueError: for a mesh with another number of devices.
        """
        sizes = [mesh.shape[name] for name in mesh.axis_names]
        if math.prod(sizes) != self.devices:
            raise ValueError(
                f"the program is for {self.devices} devices and the mesh has {math.prod(sizes)}; "
                "pass the mesh that it was compiled for."
            )
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        parts: dict[tuple[str, ...], list[Collective]] = {}
        for c in self.collectives:
            axes = zip(mesh.axis_names, sizes, strides, strict=True)
            key = tuple(
                name
                for name, size, stride in axes
                if any(len({d // stride % size for d in group}) > 1 for group in c.groups)
            )
            parts.setdefault(key, []).append(c)
        return {key: replace(self, collectives=tuple(own)) for key, own in parts.items()}

    def by_branch(self) -> dict[tuple[str, int], "WireReport"]:
        """Returns the report of each (conditional, branch), as if that branch were always taken.

        Other conditionals are unchanged: call `by_branch` on the result for those.
        """
        reports = {}
        for name, branches in self.conditionals:
            others = tuple(pair for pair in self.conditionals if pair[0] != name)
            for i in range(branches):
                taken = (c for c in self.collectives if dict(c.branch).get(name, i) == i)
                reports[name, i] = replace(self, collectives=tuple(taken), conditionals=others)
        return reports

    def per_step(self, shares: Mapping[str | tuple[str, int], float] | None = None) -> float:
        """Returns the bytes per step of the busiest device, averaged over a run.

        Args:
            shares: for branches, by name or (conditional, number), how often they are taken when
                their conditional is reached, as a share, such as {"from step 0": 0.05} or
                {"one_bit_adam: dense": 1000 / 20000}. Periodic branches carry their share in the
                program. One branch of a conditional may be left out; it gets the rest.

        Raises:
            ValueError: for a branch that is not in the program, for shares that are not between 0
                and 1 or do not add up to 1, and where a conditional that sends lacks shares; the
                message names the branches.
        """
        self._require_trips()
        weights = self._shares(shares or {})
        amounts = [0.0] * self.devices
        for c in self.collectives:
            weight = math.prod(weights[pair] for pair in c.branch) * (c.times or 0)
            amounts = [a + weight * float(s) for a, s in zip(amounts, c.sent, strict=True)]
        return max(amounts)

    def _shares(self, given: Mapping[str | tuple[str, int], float]) -> dict[tuple[str, int], float]:
        """The share of every branch."""
        names = {(b.conditional, b.number): b.name for b in self.named}
        known = {(b.conditional, b.number): 1 / b.every for b in self.named if b.every}
        everywhere = [(name, i) for name, count in self.conditionals for i in range(count)]
        if unknown := given.keys() - {*everywhere, *names.values()}:
            raise ValueError(
                f"no branch of the program is called {sorted(map(str, unknown))[0]!r}; it has "
                f"{', '.join(sorted(map(repr, names.values()))) or 'none with a name'}."
            )
        if wrong := [share for share in given.values() if not 0 <= share <= 1]:
            raise ValueError(f"a share is a number from 0 to 1, got {wrong[0]!r}.")
        for pair in everywhere:
            key = pair if pair in given else names.get(pair, pair)
            if key in given:
                known[pair] = float(given[key])
        sending = {name for c in self.collectives if any(c.sent) for name, _ in c.branch}
        for name, count in self.conditionals:
            those = [(name, i) for i in range(count)]
            open_ = [pair for pair in those if pair not in known]
            rest = 1 - sum(known.get(pair, 0) for pair in those)
            if rest < -1e-9 or (not open_ and rest > 1e-9):
                called = ", ".join(_called(those, names))
                raise ValueError(f"the shares of {called} must add up to 1.")
            if len(open_) > 1 and name in sending:
                called = _called(those, names)
                raise ValueError(
                    f"per_step needs the share of {' or of '.join(called)}: "
                    f"per_step({{{called[0]}: share of the steps}})."
                )
            known |= dict.fromkeys(open_, rest)
        return known

    def as_dict(self) -> dict[str, Any]:
        """Returns lists, dicts and numbers (fractions as floats), without unknown totals."""
        totals = () if self.unknown_loops else ("bytes_max", "bytes_mean", "rounds")
        data = asdict(self) | {name: getattr(self, name) for name in ("unknown_loops", *totals)}
        return json.loads(json.dumps(data, default=float))

    def __str__(self) -> str:
        """A line for each collective, with the bytes of one execution, and a line for the total."""
        names = "op", "dtype", "elements", "group", "times", "bytes max", "bytes mean", "branch"
        called = {(b.conditional, b.number): b.name for b in self.named}
        layout = "{:<20} {:<9} {:>13} {:>5} {:>7} {:>14} {:>14}  {}"
        lines = [
            layout.format(*row).rstrip()
            for row in (names, *(_row(c, called) for c in self.collectives))
        ]
        total = f"unknown, as are the trips of {', '.join(self.unknown_loops)}"
        if not self.unknown_loops:
            most, mean = shown(self.bytes_max), shown(self.bytes_mean)
            total = (
                f"a device sends at most {most} bytes, {mean} on average; {_rounds(self.rounds)}"
            )
        return "\n".join([*lines, f"total: {total}"])

    def _total(self, amounts: Sequence[Bytes]) -> Bytes:
        """The sum of one amount per collective, over the branches where it is largest."""
        self._require_trips()
        pairs = zip(self.collectives, amounts, strict=True)
        return worst([(c.branch, (c.times or 0) * amount) for c, amount in pairs])

    def _require_trips(self) -> None:
        """Raises a ValueError if a loop's trip count is not in the program."""
        if self.unknown_loops:
            raise ValueError(
                f"no total: the program does not hold the trip count of {self.unknown_loops}. Use "
                "loops of fixed length (lax.scan), or add up the entries with times=None yourself."
            )


def worst(amounts: Sequence[tuple[Branch, Bytes]]) -> Bytes:
    """The sum of all amounts, with the largest branch of each conditional."""
    total: Bytes = sum(amount for branch, amount in amounts if not branch)
    conditionals: dict[str, dict[int, list[tuple[Branch, Bytes]]]] = {}
    for branch, amount in amounts:
        if branch:
            (name, i), *inner = branch
            conditionals.setdefault(name, {}).setdefault(i, []).append((tuple(inner), amount))
    return total + sum(max(map(worst, branches.values())) for branches in conditionals.values())


def _leaving(c: Collective, hosts: Sequence[int], host: int) -> Bytes:
    """The bytes that a host sends to others in one execution."""
    if c.op == "collective-permute":
        pairs = ((a, b) for a, b in c.groups if hosts[a] == host != hosts[b])
        return sum(c.sent[a] for a, _ in pairs)
    total: Bytes = 0
    for group in c.groups:
        inside = [device for device in group if hosts[device] == host]
        if not inside or len(inside) == len(group):
            continue
        sent = Fraction(sum(c.sent[device] for device in inside))
        is_paired = c.op in ("all-to-all", "ragged-all-to-all")
        elsewhere = Fraction(len(group) - len(inside), len(group) - 1)
        total += sent * (elsewhere if is_paired else Fraction(1, len(inside)))
    return exact(total)


def _row(c: Collective, called: Mapping[tuple[str, int], str]) -> tuple[str, ...]:
    elements, mean = sum(map(math.prod, c.shapes)), Fraction(sum(c.sent)) / len(c.sent)
    numbers = map(shown, (elements, c.group_size, c.times, max(c.sent), mean))
    branch = " ".join(called.get((name, i), f"{name}[{i}]") for name, i in c.branch)
    return c.op, "+".join(dict.fromkeys(c.dtypes)), *numbers, branch


def _called(branches: Sequence[tuple[str, int]], names: Mapping[tuple[str, int], str]) -> list[str]:
    """What errors call the branches of a conditional: those with names by them, else all by number.

    A conditional that jaxcomm has not named has a name of XLA's, which differs between programs.
    """
    named = [repr(names[pair]) for pair in branches if pair in names]
    return named or [repr(pair) for pair in branches]


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


def shown(amount: Bytes | float | None) -> str:
    """A number with at most one decimal, and thousands apart."""
    return "unknown" if amount is None else f"{float(amount):,.1f}".removesuffix(".0")


def exact(amount: Bytes) -> Bytes:
    """An int if the number is whole."""
    return int(amount) if amount == int(amount) else amount
