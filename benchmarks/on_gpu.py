"""What was measured on a GPU, as tables, and as the choice of implementations that follows from it.

`python -m benchmarks.tables` uses it. The results are of `python -m benchmarks.kernels`, of
`python -m benchmarks.gpu_steps`, and of `python -m benchmarks.overlap`, which measures programs.
"""

import json
import re
from pathlib import Path
from typing import Any

from jaxcomm.kernels._implementations import OPERATIONS, PLAIN

RESULTS = Path(__file__).parent / "results"
MEASURED = {"9.0": RESULTS / "kernels_h100.json"}
SIZES = (1, 16, 100, 256, 1024)
# Of the plain version's time: XLA fuses that one with what is around it.
MARGIN = 0.95
STEPS = {
    "none": "no exchange",
    "float32": "float32 mean",
    "bfloat16": "bfloat16 mean",
    "int8": "int8 mean",
    "vote": "vote",
    "cnat": "natural compression",
    "int4": "int4 with feedback",
    "scaled_sign": "scaled signs with feedback",
    "low_rank": "low rank, 4",
    "one_bit_adam": "1-bit Adam",
    "gaussiank": "Gaussiank, 1 %",
    "topk_allgather": "TopkA, 1 %",
    "oktopk": "Ok-Topk, 1 %",
    "multi_steps": "int4 with feedback, in every 4th step",
}
DUE = {
    "multi_steps": "`multi_steps` of int8, every 4th step",
    "multi_steps_due": "the same with `due=True`",
    "local_steps": "`local_steps` of int4, every 32nd step, `delay=1`",
    "local_steps_due": "the same with `due=True`",
    "one_bit_adam": "`one_bit_adam` after its dense steps",
    "one_bit_adam_bits": "the same with `dense=False`",
    "dense_first": "int4 with feedback by `dense_first`",
    "dense_first_int4": "the same with `dense=False`",
}
COMPILED = STEPS | {
    "topk_dsa": "TopkDSA, 1 %",
    "gtopk": "gTopk, 1 %",
    "bfloat16_by_hosts": "bfloat16 mean, two hosts of four",
    "int8_by_hosts": "int8 mean, two hosts of four",
}

Times = dict[tuple[str, str], dict[float, dict[str, Any]]]


def read(path: Path) -> Times:
    """(operation, implementation) -> MiB -> row."""
    found: Times = {}
    for row in json.loads(path.read_text())["rows"]:
        found.setdefault((row["operation"], row["implementation"]), {})[row["mib"]] = row
    return found


def fastest() -> str:
    """The text of `jaxcomm/kernels/fastest.json`; operations that were not timed are not in it."""
    chosen: dict[str, dict[str, list[tuple[int, str]]]] = {}
    for capability, path in MEASURED.items():
        times, of_device = read(path), chosen.setdefault(capability, {})
        for operation, names in sorted(OPERATIONS.items()):
            if (operation, PLAIN) not in times:
                continue
            plain = times[operation, PLAIN]
            rows = [(int(mib * 2**18), _best(times, operation, names, mib)) for mib in plain]
            of_device[operation] = sorted(rows)
    text = json.dumps(chosen, indent=1) + "\n"
    return re.sub(r"\[\s+(\d+),\s+(\S+)\s+\]", r"[\1, \2]", text)  # a line for each size


def _best(times: Times, operation: str, names: tuple[str, ...], mib: float) -> str:
    us = {name: times[operation, name][mib]["us"] for name in names}
    best = min(us, key=lambda name: us[name])
    return best if us[best] <= MARGIN * us[PLAIN] else PLAIN


def kernels() -> tuple[list[str], list[list[str]]]:
    """Of each operation and implementation: shares of a copy's speed, and GB/s."""
    rows = []
    for (operation, name), at in read(MEASURED["9.0"]).items():
        if name in (PLAIN, "default", *OPERATIONS.get(operation.partition(" (")[0], ())):
            of_copy = [f"{at[mib]['of_copy']:.2f}" if mib in at else "" for mib in SIZES]
            gb = f"{at[256]['gb_per_s']:.0f}" if 256 in at else ""
            rows.append([f"`{operation}`", name, *of_copy, gb])
    return ["", "", *(f"{mib} MiB" for mib in SIZES), "GB/s at 256 MiB"], rows


def steps(device: str) -> tuple[list[str], list[list[str]]]:
    """What a method adds to a step, in per cent of it: its time, and that of its kernels."""
    found = json.loads((RESULTS / f"gpu_steps_{device}.json").read_text())
    rows = []
    for method, name in STEPS.items():
        cells = []
        for model in ("resnet50", "transformer"):
            row = next((row for row in found[model] if row["method"] == method), None)
            cells += _shares(row)
        if any(cells):
            rows.append([name, *cells])
    heads = ["ResNet-50", "its kernels", "transformer", "its kernels"]
    return ["", *heads], rows


def _shares(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["", ""]
    if row["method"] == "none":
        return [f"{row['ms']:.1f} ms", f"{row['kernels_ms']:.1f} ms"]
    return [f"{100 * row['over_none']:+.1f} %", f"{100 * row['exchange_share']:+.1f} %"]


def overlap(target: str) -> tuple[list[str], list[list[str]]]:
    """What travels behind the backward pass of ResNet-50."""
    rows = []
    for row in _overlap("resnet50", target):
        if row["method"] in DUE.keys() - {"one_bit_adam"}:
            continue
        shares = [f"{row[name]:.2f}" for name in ("hidden", "behind_products")]
        peak = [str(row["peak_mib"]), f"{row['of_first']:.2f}"]
        rows.append([COMPILED[row["method"]], f"{row['sent_mb']:.1f}", *shares, *peak])
    return ["method", "MB sent", "hidden", "behind products", "peak MiB", "of float32's"], rows


def due() -> tuple[list[str], list[list[str]]]:
    """What is exchanged in some steps of ResNet-50, by count and as the host says, on H100s."""
    rows = []
    for row in sorted(_overlap("resnet50", "h100"), key=lambda row: row["method"]):
        if row["method"] in DUE:
            sent = f"{row['sent_mb'] or row['conditional_mb']:.1f}"
            shares = [f"{row[name]:.2f}" for name in ("hidden", "behind_products")]
            rows.append([DUE[row["method"]], sent, *shares, str(row["peak_mib"])])
    return ["ResNet-50, step that exchanges", "MB sent", "hidden", "behind products", "MiB"], rows


def overlap_scanned() -> tuple[list[str], list[list[str]]]:
    """The same of scanned layers, for both GPUs."""
    a10 = {row["method"]: row for row in _overlap("scanned", "a10")}
    rows = []
    for row in _overlap("scanned", "h100"):
        if row["method"] == "psum":
            continue
        shares = [row["hidden"], row["behind_products"], a10[row["method"]]["behind_products"]]
        shares = [f"{share:.2f}" for share in (*shares, row["of_first"])]
        rows.append([COMPILED[row["method"]], f"{row['sent_mb']:.1f}", *shares])
    behind = [f"behind products, {name}" for name in ("H100", "A10")]
    return ["method", "MB sent", "hidden, H100", *behind, "memory, of pmean's"], rows


def overlap_hsdp() -> tuple[list[str], list[list[str]]]:
    """The same between two groups of four, within which parameters are split."""
    plain, *inside = _overlap("scanned", "h100", fsdp=4)
    after = [row for row in _overlap("exchanged_after", "h100", fsdp=4) if row["method"] != "psum"]
    names = [("`jax.lax.pmean` after the loop", plain)]
    names += [(f"{row['method']} after the backward pass", row) for row in after]
    names += [(f"`in_backward`, {row['method']}", row) for row in inside]
    rows = []
    for name, row in names:
        shares = [f"{row[key]:.2f}" for key in ("hidden", "behind_products")]
        rows.append([name, f"{row['sent_mb']:.1f}", *shares, f"{row['peak_mib']} MiB"])
    heads = ["MB sent", "hidden", "behind products", "memory of a device"]
    return ["between groups", *heads], rows


def _overlap(model: str, target: str, fsdp: int = 1) -> list[dict[str, Any]]:
    found = json.loads((RESULTS / "gpu_overlap.json").read_text())["rows"]
    wanted = (model, target, fsdp)
    return [row for row in found if (row["model"], row["target"], row["fsdp"]) == wanted]
