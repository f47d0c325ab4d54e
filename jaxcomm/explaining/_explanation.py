"""What was found out about a chain, and how it is shown."""

import dataclasses
import math
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxcomm.wire._report import Branch, Bytes, WireReport, shown


class Leaf(NamedTuple):
    """A parameter.

    Attributes:
      path: such as "layers/0/kernel".
      shape: its global shape.
      travels: in which formats, by which algorithms; "not sent" if it is frozen, empty, left out
        or on one device.
      messages: the names of the messages that carry it.
    """

    path: str
    shape: tuple[int, ...]
    travels: str
    messages: tuple[str, ...]


class Sent(NamedTuple):
    """A message, in which some leaves travel together.

    Attributes:
      name: such as "bucket 2", "exempt" or "flags, loss".
      form: the format and the algorithm.
      leaves: the paths of the leaves.
      hops: (operation, times, the most bytes that any device sends in them), in order.
      by_device: bytes that each device of the mesh sends.
      branch: (conditional, branch) pairs that lead to it; () if it is sent in every step.
      when: what these branches are called.
    """

    name: str
    form: str
    leaves: tuple[str, ...]
    hops: tuple[tuple[str, int, Bytes], ...]
    by_device: tuple[Bytes, ...]
    branch: Branch
    when: str

    @property
    def sent(self) -> Bytes:
        """The bytes of the device that sends most."""
        return max(self.by_device)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found; `print` shows it.

    Attributes:
      devices: the number of devices of the mesh.
      leaves: the parameters.
      messages: what one step sends.
      wire: the same as a `WireReport`, whose `per_step` is the average over a run.
      dense_bytes: what a device would send in a float32 mean of the leaves that are sent, or of
        all if none is.
      own_bytes: state that differs from device to device, on each device.
      shared_bytes: state that is equal on all devices or split, on each device.
      needs: (method, what it needs), outermost first.
      world: the number of devices along the axis of the exchange.
      alike: the other axes of the mesh along which all devices send the same, because no parameter
        that is compressed is split over them.
      is_exempt: whether no parameter is compressed because of its shape or its name.
      host_bytes: what the host that sends most sends to other hosts in a step, see
        `WireReport.bytes_between`; None on one host, and where each has one device.
    """

    devices: int
    leaves: tuple[Leaf, ...]
    messages: tuple[Sent, ...]
    wire: WireReport
    dense_bytes: Bytes
    own_bytes: int
    shared_bytes: int
    needs: tuple[tuple[str, str], ...]
    world: int
    alike: tuple[str, ...]
    is_exempt: bool
    host_bytes: Bytes | None

    @property
    def bytes_max(self) -> Bytes:
        """The bytes of the device that sends most, in the step in which it sends most."""
        return self.wire.bytes_max

    def __str__(self) -> str:
        values = sum(math.prod(leaf.shape) for leaf in self.leaves)
        each = max(values, 1)
        lines = [
            f"{_counted(len(self.leaves), 'parameter')} of {_counted(values, 'value')} on "
            f"{_counted(self.devices, 'device')}{self._of_all()}",
            "",
        ]
        lines += _table(["parameter", "shape", "travels", "in"], _leaf_rows(self.leaves)) + [""]
        lines += _table(["message", "form", "bytes", "hops"], map(_message_row, self.messages))
        lines += [
            *self._between_hosts(each),
            f"A device sends at most {shown(self.bytes_max)} bytes in a step"
            f"{'' if self.host_bytes is None else ', within its host too'}, "
            f"{float(self.bytes_max) / each:.2f} a value; a float32 mean "
            f"{float(self.dense_bytes) / each:.2f}.",
            *self._sent_alike(),
            *self._in_float32(),
            *self._alone(),
            *self._sometimes(values),
            *self._on_average(values),
            f"State on a device: {self.own_bytes:,} bytes that differ from device to device, "
            f"{self.shared_bytes:,} others.",
            "",
            f"First in the chain: the exchange; only {self._before()} may come before it. What it "
            f"needs{':' if self.needs else ' besides: nothing.'}",
        ]
        needs = (textwrap.wrap(f"- {': '.join(x)}", 90, subsequent_indent="  ") for x in self.needs)
        return "\n".join([*lines, *(line for wrapped in needs for line in wrapped)])

    def _before(self) -> str:
        """What may come before the exchange."""
        has_variates = any(name == "control_variates" for name, _ in self.needs)
        return "control_variates and local" if has_variates else "jaxcomm.local"

    def _of_all(self) -> str:
        """How many of the devices exchange with each other, if not all."""
        is_all = self.world in (1, self.devices)
        return "" if is_all else f", in groups of {self.world} that exchange"

    def _sent_alike(self) -> list[str]:
        """What several devices send because each has it."""
        if not self.alike:
            return []
        axes = " and ".join(map(repr, self.alike))
        return textwrap.wrap(
            f"Devices that differ along {axes} send the same buckets: no parameter that is "
            f"compressed is split over it. Split them, as jaxcomm.shard(params, {self.alike[0]!r}) "
            "does, and each sends its part.",
            90,
        )

    def _in_float32(self) -> list[str]:
        """What to know where all that is sent is exempt."""
        if not self.is_exempt:
            return []
        return [
            "Nothing is compressed: all parameters have at most one dimension or are exempt, and",
            "travel in float32. Make matrices of them, or pass exempt=lambda path, shape: False.",
        ]

    def _between_hosts(self, each: int) -> list[str]:
        """What leaves a host of several devices: that of a ring, in float32, from one of them."""
        if self.host_bytes is None:
            return []
        return [
            f"A host sends at most {shown(self.host_bytes)} bytes to other hosts in a step, "
            f"{float(self.host_bytes) / each:.2f} a value; a float32 mean "
            f"{float(self.dense_bytes) / each:.2f}."
        ]

    def _alone(self) -> list[str]:
        """What to know of an axis of one device."""
        if self.world > 1:
            return []
        return [
            "The axis of the exchange has one device: no gradient is sent, but codecs still round."
        ]

    def _sometimes(self, values: int) -> list[str]:
        """What is not sent in every step."""
        parts = []
        for when in dict.fromkeys(message.when for message in self.messages if message.when):
            sent = [message.by_device for message in self.messages if message.when == when]
            most = max(map(sum, zip(*sent, strict=True)))
            parts.append(
                f"{shown(most)} bytes, {float(most) / max(values, 1):.2f} a value ({when})"
            )
        return textwrap.wrap(f"Not in every step: {', '.join(parts)}.", 90) if parts else []

    def _on_average(self, values: int) -> list[str]:
        """What a step sends on average, where the program says how often it takes each branch."""
        try:
            mean = self.wire.per_step()
        except ValueError:  # a share depends on the run, such as that of its dense steps
            return []
        if math.isclose(mean, self.bytes_max, rel_tol=1e-9):  # an exact fraction
            return []
        return [f"On average {shown(mean)} bytes a step, {mean / max(values, 1):.2f} a value."]


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _leaf_rows(leaves: tuple[Leaf, ...]) -> Iterator[tuple[str, ...]]:
    """A row for each leaf; leaves whose paths differ only in their numbers share one."""
    rows: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for leaf in leaves:
        key = (re.sub(r"\d+", "*", leaf.path), str(leaf.shape), leaf.travels)
        rows.setdefault(key, []).append((leaf.path, *leaf.messages))
    for (pattern, shape, travels), found in rows.items():
        names = dict.fromkeys(name for _, *own in found for name in own)
        path = found[0][0] if len(found) == 1 else f"{pattern} ({len(found)})"
        yield path, shape, travels, _ranges(list(names))


def _ranges(names: list[str]) -> str:
    """Names that differ only in their numbers as one, such as "bucket 1-3, 5"."""
    found: dict[str, list[int]] = {}
    for name in names:
        kind, _, number = name.partition(" ")
        found.setdefault(kind, []).extend([int(number)] if number else [])
    parts = []
    for kind, numbers in found.items():
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and number == runs[-1][-1] + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        spans = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
        parts.append(f"{kind} {', '.join(spans)}".strip())
    return ", ".join(parts)


def _message_row(message: Sent) -> tuple[str, ...]:
    hops = ", ".join(
        f"{operation}{f' x {times}' if times > 1 else ''} {shown(sent)}"
        for operation, times, sent in message.hops
    )
    when = f" ({message.when})" if message.when else ""
    return message.name + when, message.form, shown(message.sent), hops


def _table(head: list[str], rows: Any) -> list[str]:
    """Columns as wide as they need to be."""
    cells = [tuple(head), *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
