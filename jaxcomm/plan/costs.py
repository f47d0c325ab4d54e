"""What messages and codecs cost on a machine: defaults, or what `probe` has measured.

An exchange of n values by one method takes

    call + local seconds of n values + the sum over its steps of what the network needs for them

where a message takes `latency` plus its time on the slowest of its links, at `efficiency` of the
link's rate, or `per_byte` of the device that sends it, if that is longer.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxcomm._numbers import is_real
from jaxcomm.plan.files import File, pyyaml

VERSION = 3
MERGING, BY_HOSTS = "/ring", "/hosts"  # ends of names in `Costs.local`
SIZES = (2**18, 2**21)  # values at which codes are timed; the second fills a bucket
_NOT_MEASURED = "not measured here"


@dataclasses.dataclass(frozen=True)
class Costs:
    """What messages and codecs cost, in seconds.

    Attributes:
      source: where the numbers come from.
      latency: the latency of a message, in seconds.
      per_byte: the least time that a device needs to send a byte, in seconds per byte.
      efficiency: the share of a link's rate that messages reach, in (0, 1].
      half_duplex: whether both directions between two devices share the rate of one.
      swap: additional seconds for a byte that two CPU processes send to each other at once: a swap
        is an all-reduce of the pair, which copies, adds and subtracts.
      stripes: whether XLA's own collectives are spread over all cables between two nodes, as NCCL
        does, and its all-reduce uses a tree where that has less latency. Any other message goes
        over one cable.
      overlap: whether the backward pass continues while messages travel.
      call: the fixed cost of an exchange, whatever it sends, in seconds.
      local: for each family of methods, seconds per value for encoding, merging, decoding, and
        error feedback or selecting, with all devices of a machine busy, including the time that
        they wait for each other. Two numbers: for a value among 2^18 and among 2^21, where the
        fixed cost of operations is spread over more values. A name that ends in "/ring" is for
        algorithms that decode and encode on the way, one in "/hosts" for exchanges in which the
        devices of a host add up first. Without an entry of its own, the latter is assumed to cost
        as much as "/ring", and this as much as the others.
    """

    source: str
    latency: float
    per_byte: float
    efficiency: float
    half_duplex: bool
    swap: float
    stripes: bool
    overlap: bool
    call: float
    local: Mapping[str, tuple[float, float]]

    def __post_init__(self) -> None:
        for field in ("latency", "per_byte", "swap", "call"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ValueError(f"{field} is in seconds, 0 or more, got {getattr(self, field)!r}.")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is a share in (0, 1], got {self.efficiency!r}.")
        for family, pair in self.local.items():
            if not all(0 <= seconds < float("inf") for seconds in pair):
                raise ValueError(f"{family} takes seconds per value, 0 or more, got {pair!r}.")

    @property
    def are_measured(self) -> bool:
        """Whether they were measured, and on CPUs; only then are errors of predictions known."""
        return self.is_between_cpus and _NOT_MEASURED not in self.source

    @property
    def is_between_cpus(self) -> bool:
        """Whether messages behave as between CPU processes, which are connected by gloo."""
        return self.half_duplex or self.swap > 0

    def local_seconds(self, family: str, values: float, ending: str = "") -> float:
        """Seconds for this many values. A family without costs counts as the slowest one.

        Args:
          family: its name.
          values: the number of values.
          ending: of the names of its algorithm's kind in `local`.
        """
        small, full = SIZES
        pair = max(self.local.values(), key=lambda pair: pair[1], default=(0.0, 0.0))
        for more in {"": ("",), MERGING: ("", MERGING), BY_HOSTS: ("", MERGING, BY_HOSTS)}[ending]:
            pair = self.local.get(family + more, pair)
        among_few, among_many = pair
        if values <= small:
            return among_few * values
        if values >= full:  # one bucket after the other
            return among_many * values
        share = (values - small) / (full - small)
        return (1 - share) * among_few * small + share * among_many * full

    def save(self, path: str | Path) -> None:
        """Writes the costs as YAML, for `read`."""
        local = {family: list(pair) for family, pair in self.local.items()}
        values = {"version": VERSION, **dataclasses.asdict(self), "local": local}
        Path(path).write_text(pyyaml().safe_dump(values, sort_keys=False))


def read(path: str | Path) -> Costs:
    """Reads costs that `Costs.save` wrote.

    Args:
      path: the path of a file, such as "costs.yaml", which `python -m jaxcomm.probe` writes.

    Returns:
      The costs.

    Raises:
      TypeError: for anything but a path.
      ValueError: for an invalid file, in one line with its name and the line number.
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"read_costs takes the path of a file, got {path!r}.")
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}; python -m jaxcomm.probe writes one.")
    file = File(Path(path), "latency: 0.0001")
    values = dict(file.settings)
    version = values.pop("version", VERSION)
    if version != VERSION:
        wrong = f"the file is version {version}; this jaxcomm reads version {VERSION}."
        raise file.error("version", f"{wrong} Measure the costs again.")
    fields = {field.name: field.type for field in dataclasses.fields(Costs)}
    for key in values:
        if key not in fields:
            raise file.error(key, f"unknown key {key!r}; costs have {', '.join(fields)}.")
    for key in fields:
        if key not in values:
            raise file.error(key, f"costs need {key!r}.")
        values[key] = _numbers_in(values[key]) if key != "source" else values[key]
        _check_type(file, key, values[key])
    values["local"] = {family: tuple(pair) for family, pair in values["local"].items()}
    try:
        return Costs(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _check_type(file: File, key: str, value: Any) -> None:
    flags = key in ("half_duplex", "stripes", "overlap")
    if flags and not isinstance(value, bool):
        raise file.error(key, f"{key} is true or false, got {value!r}.")
    if key == "local":
        _check_local(file, value)
    elif key == "source":
        if not isinstance(value, str):
            raise file.error(key, f"source is a text, got {value!r}.")
    elif not flags and not is_real(value):
        raise file.error(key, f"{key} is a number, got {value!r}.")


def _check_local(file: File, local: Any) -> None:
    if not isinstance(local, dict):
        raise file.error("local", f"local has a line for each family, got {local!r}.")
    known = [family for family in DEFAULTS["cpu"].local if "/" not in family]
    for family, pair in local.items():
        if not any(str(family) == name + end for name in known for end in ("", MERGING, BY_HOSTS)):
            wrong = f"there is no family {family!r}; there are {', '.join(known)}."
            raise file.error("local", wrong)
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(is_real, pair)):
            wrong = f"{family} takes seconds per value, among {SIZES} of them, got {pair!r}."
            raise file.error("local", wrong)


def _numbers_in(value: Any) -> Any:
    """The value, with texts such as 1e-4, which YAML 1.1 does not read as numbers, converted."""
    if isinstance(value, dict):
        return {key: _numbers_in(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers_in(item) for item in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def defaults(device: str) -> Costs:
    """Default costs, which were not measured on this machine.

    Args:
      device: "cpu" or "gpu".

    Returns:
      The costs; their `source` names them as defaults.

    Raises:
      ValueError: for another device.
    """
    if not isinstance(device, str) or device not in DEFAULTS:
        raise ValueError(f"unknown device {device!r}; write {' or '.join(DEFAULTS)}.")
    return DEFAULTS[device]


def _picoseconds(**of: float) -> dict[str, tuple[float, float]]:
    return {family: (1e-12 * each, 1e-12 * each) for family, each in of.items()}


# CPU, on two cores of a current x86 server: codes by `python -m jaxcomm.probe --simulate=2`,
# medians of three runs; messages as between the four processes of `benchmarks.planner`. GPU: codes
# as in steps of one H200 on a mesh of one (`python -m benchmarks.gpu_steps`), with fp8 as int8,
# int2 as int4, and other sparse means as TopkA; sparse means in ResNet-50, the others in the
# transformer, float32 and low rank on an H100. Messages are estimated, not measured: tens of
# microseconds for one over TCP, and 400 GB/s within a machine, or less if the file says so.
DEFAULTS = {
    "cpu": Costs(
        source=f"defaults for a CPU, {_NOT_MEASURED}",
        latency=2.6e-4,
        per_byte=6e-10,
        efficiency=0.95,
        half_duplex=True,
        swap=5.7e-10,
        stripes=False,
        overlap=False,
        call=0.0,
        local={
            "float32": (0.7e-9, 0.4e-9),
            "float32/ring": (1.9e-9, 2.2e-9),
            **dict.fromkeys(("bfloat16", "float16"), (1.5e-9, 1.2e-9)),
            **dict.fromkeys(("bfloat16/ring", "float16/ring"), (1.9e-9, 1.6e-9)),
            **dict.fromkeys(("int8", "fp8_e4m3"), (2.2e-9, 2.0e-9)),
            **dict.fromkeys(("int8/ring", "fp8_e4m3/ring"), (2.1e-9, 2.0e-9)),
            "cnat": (3.3e-9, 2.8e-9),
            "cnat/ring": (3.0e-9, 2.5e-9),
            "int4": (3.2e-9, 4.2e-9),
            **dict.fromkeys(("scaled_sign", "int2"), (2.8e-9, 3.5e-9)),
            "vote": (2.0e-9, 1.4e-9),
            "oktopk": (4.4e-9, 6.1e-9),
            **dict.fromkeys(
                ("topk_allgather", "topk_dsa", "gtopk", "gaussiank"), (10.5e-9, 9.4e-9)
            ),
            "topk_chunks": (12e-9, 12e-9),
            "powersgd1": (1.7e-9, 1.8e-9),
            **dict.fromkeys(("powersgd2", "powersgd4"), (2.1e-9, 2.1e-9)),
        },
    ),
    "gpu": Costs(
        source=f"defaults for a GPU, {_NOT_MEASURED}",
        latency=3e-5,
        per_byte=2.5e-12,
        efficiency=0.93,
        half_duplex=False,
        swap=0.0,
        stripes=True,
        overlap=True,
        call=5e-5,
        local=_picoseconds(
            float32=1.7,
            bfloat16=3.2,
            float16=3.2,
            int8=4.2,
            fp8_e4m3=4.2,
            cnat=9.1,
            int4=10,
            int2=10,
            scaled_sign=12,
            vote=4.1,
            oktopk=34,
            gaussiank=31,
            **dict.fromkeys(("topk_allgather", "topk_chunks", "topk_dsa", "gtopk"), 76),
            **dict.fromkeys(("powersgd1", "powersgd2", "powersgd4"), 19),
        ),
    ),
}
