"""The end of a run: its measurements, as a table and as one line of JSON.

`python -m train.report WORKDIR... [--out=report.png]` compares runs: a table, and plots of the loss
against steps, time and bytes.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from train.compare import compare
from train.errors import UserError
from train.metrics import finite


def show(summary: dict[str, Any], workdir: Path) -> None:
    """Prints the table, and the summary as the very last line, on process 0."""
    if jax.process_index() != 0:
        return
    s, unit = summary, _unit(summary)
    table = Table(title=f"{s['devices']} devices in {s['processes']} processes", show_header=False)
    rows = {
        **_score(s),
        "end of the optimizer's warm-up": s["frozen_at"] and f"step {s['frozen_at']}",
        "step": f"{s['step_ms']:.2f} ms",
        "the same step without exchange": f"{s['compute_ms']:.2f} ms",
        "communication": _communication(s),
        "median step while training": _number(s["loop_step_ms"], " ms"),
        f"{unit} per second, while training": _number(s[f"{unit}_per_second"], ""),
        "waiting for input, while training": _percent(s["input_share"]),
        "scaling efficiency, measured": _measured(s["efficiency"]),
        "communication, predicted": _predicted(s),
        "scaling efficiency, predicted": _percent(s["predicted_efficiency"]),
        "bandwidth of a device": _number(s["gigabits"], f" Gb/s ({s['gigabits_from']})"),
        "bytes per parameter and device, compiled program": f"{s['bytes_per_param']:.3f}",
        "the same, between groups of devices": _between(s),
        "the same, mean over all steps of the run": _number(s["bytes_per_param_mean"], ""),
        "bytes per parameter and device, interface": _number(
            s["interface_bytes_per_param"], f" ({s['interface']})"
        ),
        "result of the exchange against the exact mean": _error(s),
        "residual of a device, over the norm of the mean gradient": _kept(s),
        "ties among votes": "exchange_ties" in s and _percent(s["exchange_ties"]) or None,
        "parameters": f"{s['params']}",
        "seconds": f"{s['seconds']:.1f}",
        "workdir": str(workdir),
    }
    for name, value in rows.items():
        if value is not None:  # The optimizer may have no warm-up.
            table.add_row(name, value)
    Console(width=100, soft_wrap=True).print(table)
    print(json.dumps(finite(summary), allow_nan=False), flush=True)


def stopped(step: int, workdir: Path) -> None:
    """Says on process 0 that a run has ended because it was asked to."""
    if jax.process_index() == 0:
        print(
            f"stopped after step {step}, which is saved; continue with --workdir={workdir} "
            "--config.checkpoint.resume=True",
            flush=True,
        )


def _unit(s: dict[str, Any]) -> str:
    return "tokens" if "test_tokens" in s else "images"


def _score(s: dict[str, Any]) -> dict[str, str]:
    """The results of a test of images or of a language model."""
    if _unit(s) == "images":
        return {"test accuracy": f"{100 * s['test_accuracy']:.2f} % of {s['test_images']} images"}
    return {
        "test loss": f"{s['test_loss']:.4f} nats per token, of {s['test_tokens']} tokens",
        "perplexity per token": f"{_exp(s['test_loss']):.3f}",
    }


def _exp(x: float) -> float:
    """The exponential; infinity where it is too large for a number."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _communication(s: dict[str, Any]) -> str:
    if s["devices"] == 1:
        return "none: there is one device, so nothing is sent, whatever config.sync says"
    noise = ", within noise of none" if s["communication_ms"] <= 0 else ""
    return f"{s['communication_ms']:.2f} ms in {s['rounds']} rounds{noise}"


def _measured(efficiency: float) -> str:
    return (
        f"{_percent(efficiency)}, within noise of 100 %" if efficiency > 1 else _percent(efficiency)
    )


def _predicted(s: dict[str, Any]) -> str | None:
    if s["predicted_ms"] is None:
        return None
    return f"{s['predicted_ms']:.2f} ms, most of it {s['predicted_largest']}"


def _between(s: dict[str, Any]) -> str | None:
    between = s["bytes_per_param_between"]
    return None if between is None else f"{between:.3f}"


def _error(s: dict[str, Any]) -> str | None:
    """Mean over the looks of `train.inspection`."""
    if "exchange_cosine" not in s:
        return None
    error = f"error {_percent(s['exchange_error'])}, " if "exchange_error" in s else ""
    return f"{error}cosine {s['exchange_cosine']:.4f}"


def _kept(s: dict[str, Any]) -> str | None:
    residual, gradient = s.get("exchange_residual_norm"), s.get("exchange_gradient_norm")
    return f"{residual / gradient:.2f}" if residual is not None and gradient else None


def _number(value: float | None, unit: str) -> str:
    return "not measured" if value is None else f"{value:.3f}{unit}"


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{100 * value:.1f} %"


def main(arguments: list[str]) -> int:
    """Compares the runs of some directories; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m train.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("workdirs", nargs="+", metavar="WORKDIR", help="of a run")
    parser.add_argument("--out", type=Path, default=Path("report.png"), help="file of the plots")
    args = parser.parse_args(arguments)
    try:
        compare(args.workdirs, args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
