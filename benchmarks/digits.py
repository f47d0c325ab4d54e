"""The digits' configs, each trained on four processes of this machine: accuracies and bytes.

    python -m benchmarks.digits [--rows=float32,bfloat16,...] [--out=JSON]

Runs what is missing in the file, a minute each, and keeps the end of every run with its command.
`python -m benchmarks.tables` puts them into the pages. The bytes of the interface are those of `lo`
in the median step, so nothing else may talk to itself on this machine meanwhile.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.arguments import new_file, one_of, several

RESULTS = Path(__file__).parent / "results"
FILE = RESULTS / "digits.json"
LAUNCH = "python -m train.launch --processes=4 -- --config=configs/"
KEPT = (
    "test_accuracy",
    "test_images",
    "params",
    "devices",
    "processes",
    "frozen_at",
    "bytes_per_param",
    "bytes_per_param_mean",
    "interface_bytes_per_param",
)
# What follows LAUNCH, and what the page calls it.
ROWS = {
    "float32": "digits_resnet.py --config.sync.codec=float32",
    "bfloat16": "digits_resnet.py",
    "float16": "digits_resnet.py --config.sync.codec=float16",
    "cnat": "digits_cnat.py",
    "majority": "digits_majority.py",
    "oktopk": "digits_oktopk.py",
    "topk_allgather": "digits_oktopk.py --config.sync.algorithm=topk_allgather",
    "ef_sign": "digits_ef_sign.py",
    "one_bit_adam": "digits_one_bit_adam.py",
    "none": "digits_resnet.py --config.sync.method=none",
    "vit": "digits_vit.py",
    "vit_one_bit": "digits_vit_one_bit.py",
    "vit_local": "digits_vit_local.py",
}
ALIKE = tuple(name for name in ROWS if name not in ("none", "topk_allgather"))
BY_LABEL = ("float32", "cnat", "ef_sign", "oktopk", "topk_allgather", "one_bit_adam", "majority")
SEEDS = (0, 1, 2)


class Run(NamedTuple):
    """A row, how the examples are dealt to the devices, and a seed."""

    name: str
    by_label: bool
    seed: int

    @property
    def arguments(self) -> str:
        """What follows LAUNCH."""
        shards = " --config.data.shards=by_label" if self.by_label else ""
        return ROWS[self.name] + shards + (f" --config.seed={self.seed}" if self.seed else "")


def runs() -> Iterator[Run]:
    """All that the page shows."""
    yield from (Run(name, False, 0) for name in ALIKE)
    yield from (Run(name, True, 0) for name in ("bfloat16", "none"))
    yield from (Run(name, True, seed) for seed in SEEDS for name in BY_LABEL)


def read(path: Path = FILE) -> dict[Run, dict[str, Any]]:
    """What has been run."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {Run(row["name"], row["by_label"], row["seed"]): row for row in rows}


def alike() -> tuple[list[str], list[list[str]]]:
    """Head and cells: accuracies and bytes of one seed, and the control."""
    body = []
    for run, row in read().items():
        if run.seed == 0 and (not run.by_label or run.name in ("bfloat16", "none")):
            sent = [row["bytes_per_param"], row["interface_bytes_per_param"]]
            cells = [f"{number:.2f}" if row["bytes_per_param"] else "0" for number in sent]
            body.append([f"`{run.arguments}`", f"{100 * row['test_accuracy']:.1f} %", *cells])
    return ["command", "test accuracy", "bytes, compiled program", "bytes, interface"], body


def by_label() -> tuple[list[str], list[list[str]]]:
    """Head and cells: accuracies of all seeds where devices hold different classes."""
    found: dict[str, list[tuple[Run, dict[str, Any]]]] = {}
    for run, row in read().items():
        if run.by_label and run.name in BY_LABEL:
            found.setdefault(run.name, []).append((run, row))
    body = []
    for own in found.values():
        each = [100 * row["test_accuracy"] for _, row in own]
        seeds = ", ".join(f"{accuracy:.1f}" for accuracy in each)
        sent = f"{own[0][1]['bytes_per_param_mean']:.2f}"
        body.append([f"`{own[0][0].arguments}`", f"{statistics.mean(each):.1f} %", seeds, sent])
    return ["command", "test accuracy", "seeds", "bytes, mean of the run"], body


def train(run: Run) -> dict[str, Any]:
    """Trains, and returns what is kept of the end."""
    with tempfile.TemporaryDirectory() as folder:
        command = f"{LAUNCH}{run.arguments} --workdir={folder}/run".split()
        command[0] = sys.executable
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"digits: {run.arguments} ended with status {done.returncode}")
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    end = json.loads(lines[-1])
    return {**run._asdict(), "command": LAUNCH + run.arguments, **{key: end[key] for key in KEPT}}


def main() -> int:
    from benchmarks.netlab.measuring import circumstances

    parser = argparse.ArgumentParser(prog="python -m benchmarks.digits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--rows",
        type=several(one_of(ROWS)),
        default=list(ROWS),
        help="of these names",
    )
    parser.add_argument("--out", type=new_file, default=FILE)
    args = parser.parse_args()
    found = read(args.out)
    for run in runs():
        if run in found or run.name not in args.rows:
            continue
        found[run] = train(run)
        print(f"{100 * found[run]['test_accuracy']:.1f} %  {run.arguments}", flush=True)
        head = circumstances("benchmarks.digits")
        rows = [found[run] for run in runs() if run in found]
        args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
