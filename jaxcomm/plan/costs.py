"""What messages and codes cost on a machine: defaults, or what `probe` has measured.

An exchange of n values by one method takes

    call + local seconds * n + the sum over its steps of what the network needs for their messages

where a message takes `latency`, and then as long as the slowest of its links at `efficiency` of
their rate, or `per_byte` of the device that sends it.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxcomm.plan.files import File, pyyaml

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Costs:
    """What messages and codes cost, in seconds.

    Attributes:
      source: where the numbers come from.
      latency: of a message.
      per_byte: that a device needs at least for a byte that it sends.
      efficiency: the share of a link's rate that messages reach.
      half_duplex: whether both directions between two devices share the rate of one.
      stripes: whether a message is spread over all cables between two nodes, as NCCL does.
      overlap: whether the backward pass goes on while messages travel.
      call: of an exchange, whatever it sends.
      local: of each family of methods, for a value: encoding, merging, decoding and what error
        feedback or selecting takes, all devices of a machine at once.
    """

    source: str
    latency: float
    per_byte: float
    efficiency: float
    half_duplex: bool
    stripes: bool
    overlap: bool
    call: float
    local: Mapping[str, float]

    def __post_init__(self) -> None:
        for field in ("latency", "per_byte", "call"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ValueError(f"{field} is in seconds, 0 or more, got {getattr(self, field)!r}.")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is a share in (0, 1], got {self.efficiency!r}.")
        for family, seconds in self.local.items():
            if not 0 <= seconds < float("inf"):
                raise ValueError(f"{family} takes seconds a value, 0 or more, got {seconds!r}.")

    def of(self, family: str) -> float:
        """Local seconds of a value; of a family that is not there, those of the dearest."""
        return self.local.get(family, max(self.local.values(), default=0.0))

    def save(self, path: str | Path) -> None:
        """Writes them as YAML, which `read` reads."""
        values = {"version": VERSION, **dataclasses.asdict(self), "local": dict(self.local)}
        Path(path).write_text(pyyaml().safe_dump(values, sort_keys=False))


def read(path: str | Path) -> Costs:
    """Reads costs that `Costs.save` wrote.

    Raises:
      ValueError: for what cannot be, in one line with the file and the number of its line.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}; python -m jaxcomm.probe writes one.")
    file = File(Path(path))
    values = dict(file.settings)
    if values.pop("version", VERSION) != VERSION:
        raise file.error("version", f"this is version {VERSION} of costs; measure them again.")
    fields = {field.name: field.type for field in dataclasses.fields(Costs)}
    for key in values:
        if key not in fields:
            raise file.error(key, f"unknown key {key!r}; costs have {', '.join(fields)}.")
    for key in fields:
        if key not in values:
            raise file.error(key, f"costs need {key!r}.")
        _check_type(file, key, values[key])
    try:
        return Costs(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _check_type(file: File, key: str, value: Any) -> None:
    flags = key in ("half_duplex", "stripes", "overlap")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if flags and not isinstance(value, bool):
        raise file.error(key, f"{key} is true or false, got {value!r}.")
    if key == "local":
        pairs = value.items() if isinstance(value, dict) else [("local", value)]
        for family, seconds in pairs:
            if isinstance(seconds, bool) or not isinstance(seconds, int | float):
                raise file.error(key, f"{family} takes seconds a value, got {seconds!r}.")
    elif key == "source":
        if not isinstance(value, str):
            raise file.error(key, f"source is a text, got {value!r}.")
    elif not flags and not number:
        raise file.error(key, f"{key} is a number, got {value!r}.")


def defaults(device: str) -> Costs:
    """Costs that nobody measured on this machine.

    Args:
      device: "cpu" or "gpu".

    Raises:
      ValueError: for another device.
    """
    if device not in DEFAULTS:
        raise ValueError(f"unknown device {device!r}; write {' or '.join(DEFAULTS)}.")
    return DEFAULTS[device]


def _passes(**bytes_of: float) -> dict[str, float]:
    """Seconds of a value, for the bytes of memory that its methods read and write."""
    return {family: count / _MEMORY for family, count in bytes_of.items()}


# CPU, on an x86 server of two cores: codes by `python -m jaxcomm.probe --simulate=2`, messages as
# between the four processes of `benchmarks.planner`. GPU: counted, not measured: bytes that the
# methods read and write of a memory of 2 TB/s, and tens of microseconds for a message over TCP.
_MEMORY = 2e12
DEFAULTS = {
    "cpu": Costs(
        source="defaults for a CPU, not measured here",
        latency=1.5e-4,
        per_byte=6e-10,
        efficiency=0.95,
        half_duplex=True,
        stripes=False,
        overlap=False,
        call=1e-3,
        local={
            "float32": 5.3e-9,
            **dict.fromkeys(("bfloat16", "float16"), 1.3e-9),
            **dict.fromkeys(("int8", "fp8_e4m3"), 2.6e-9),
            "cnat": 4.7e-9,
            "int4": 5.5e-9,
            **dict.fromkeys(("scaled_sign", "int2"), 4.8e-9),
            "vote": 3.0e-9,
            "oktopk": 10.7e-9,
            **dict.fromkeys(("topk_allgather", "topk_dsa", "gtopk", "gaussiank"), 6.4e-9),
            "powersgd1": 4.4e-9,
            **dict.fromkeys(("powersgd2", "powersgd4"), 5.4e-9),
        },
    ),
    "gpu": Costs(
        source="defaults for a GPU, not measured here",
        latency=3e-5,
        per_byte=5e-11,
        efficiency=0.93,
        half_duplex=False,
        stripes=True,
        overlap=True,
        call=5e-5,
        local=_passes(
            float32=8,
            bfloat16=16,
            float16=16,
            int8=24,
            fp8_e4m3=24,
            cnat=20,
            int4=40,
            int2=40,
            scaled_sign=40,
            vote=14,
            **dict.fromkeys(("oktopk", "topk_allgather", "topk_dsa", "gtopk", "gaussiank"), 80),
            **dict.fromkeys(("powersgd1", "powersgd2", "powersgd4"), 28),
        ),
    ),
}
