"""Tables of the time on links with a rate, from what `python -m benchmarks.allreduce` has kept."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Lines = list[str]
RATES = ("50", "200", "1000", "unlimited")
LONGER = "200_8m"  # the part with 8 million weights
_COLUMNS = (*RATES, LONGER)
NAMES = {
    "psum": "a bare `psum`",
    "float32": "float32 mean",
    "bfloat16": "bfloat16 mean",
    "int8": "int8 mean",
    "cnat": "natural compression",
    "int4": "int4 with feedback",
    "scaled_sign": "scaled signs with feedback",
    "vote": "vote",
    "oktopk": "Ok-Topk, 1 %",
    "topk_allgather": "TopkA, 1 %",
    "topk_chunks": "top-k of chunks, 3 %",
    "powersgd1": "PowerSGD rank 1",
    "powersgd2": "PowerSGD rank 2",
    "powersgd4": "PowerSGD rank 4",
    "torch/float32": "PyTorch DDP",
    "torch/float16": "PyTorch DDP, fp16 hook",
    "torch/bfloat16": "PyTorch DDP, bf16 hook",
    "torch/powersgd1": "PyTorch DDP, PowerSGD rank 1",
    "torch/powersgd2": "PyTorch DDP, PowerSGD rank 2",
    "torch/powersgd4": "PyTorch DDP, PowerSGD rank 4",
}


def table(head: list[str], rows: list[list[str]]) -> Lines:
    """Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, *rows)][:1] + [
        "|" + "---|" * len(head),
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]


def star4() -> dict[str, dict[str, Any]]:
    """Method -> rate -> row, on four hosts."""
    found: dict[str, dict[str, Any]] = {}
    for rate in RATES:
        for row in _rows(rate):
            found.setdefault(row["method"], {})[rate] = row
    return found


def exchanges() -> Lines:
    """ms of an exchange alone, and over its floor."""
    rows = []
    for method, at in star4().items():
        if method in NAMES and not method.startswith("torch/"):
            cells = [f"{at[r]['ms']:.0f}{over(at[r])}" if r in at else "" for r in RATES]
            rows.append([NAMES[method], *cells])
    return table(["", *heads()], rows)


def heads() -> Lines:
    return [f"{rate} Mbit/s" if rate == RATES[0] else rate for rate in RATES]


def over(row: dict[str, Any]) -> str:
    return f" ({row['over_floor']:.2f})" if row["over_floor"] else ""


def steps() -> Lines:
    """ms of a whole step less its compute, ours and PyTorch's, by bytes."""
    found = timed_steps()
    rates = [rate for rate in RATES if any(rate in at for at in found.values())]
    rows = []
    for method in sorted(found, key=lambda m: -next(iter(found[m].values()))["bytes_busiest_link"]):
        at = found[method]
        mb = f"{next(iter(at.values()))['bytes_busiest_link'] / 1e6:.2f}"
        cells = [f"{at[r]['step_less_compute_ms']:.0f}" if r in at else "" for r in rates]
        rows.append([NAMES[method], mb, *cells])
    return table(["", "link MB", *heads()[: len(rates)]], rows)


def timed_steps() -> dict[str, dict[str, Any]]:
    """Method -> rate -> row, where whole steps were timed."""
    found = {
        method: {rate: row for rate, row in at.items() if "step_ms" in row}
        for method, at in star4().items()
    }
    return {method: at for method, at in found.items() if at and method in NAMES}


def beside_torch() -> Lines:
    """ms of whole steps, over those of PyTorch with a hook that sends as many bytes."""
    found = timed_steps()
    for row in _rows(LONGER):
        found.setdefault(row["method"], {})[LONGER] = row
    both = [name for name in NAMES if {name, f"torch/{name}"} <= found.keys()]
    body = [
        [NAMES[name], *(_over(found[name], found[f"torch/{name}"], rate) for rate in _COLUMNS)]
        for name in both
    ]
    return table(["", *heads(), "8 M weights at 200"], body)


def _over(ours: Any, theirs: Any, rate: str) -> str:
    if rate not in ours or rate not in theirs:
        return ""
    mine, other = ours[rate]["step_ms"], theirs[rate]["step_ms"]
    return f"{mine:.0f} / {other:.0f} ({mine / other:.2f})"


def steps_8m() -> Lines:
    """ms of whole steps with more weights."""
    rows = [row for row in _rows(LONGER) if row["method"] in NAMES and row.get("step_ms")]
    return table(["", "ms"], [[NAMES[row["method"]], f"{row['step_ms']:.0f}"] for row in rows])


def hosts() -> Lines:
    """ms of exchanges between hosts of four devices, by hosts and by every device on its own."""
    names = ("float32", "bfloat16", "int8", "int4", "scaled_sign", "vote")
    parts = ("50", "200")
    found = {part: {row["method"]: row for row in _rows(part, "star4x4")} for part in parts}
    cells = [[_by_hosts(found[part], name) for part in parts] for name in names]
    body = [[NAMES[name], *row] for name, row in zip(names, cells, strict=True)]
    return table(["", *heads()[: len(parts)]], body)


def _by_hosts(rows: dict[str, Any], name: str) -> str:
    ours, apart = rows[name]["ms"], rows.get(f"{name}/direct")
    return f"{ours:.0f}" + (f" / {apart['ms']:.0f} ({ours / apart['ms']:.2f})" if apart else "")


def _rows(part: str, network: str = "star4") -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"allreduce_{network}_{part}.json").read_text())["rows"]
