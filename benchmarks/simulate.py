"""How long all-reduces take on networks that no one machine holds, simulated.

    python -m benchmarks.simulate [--devices=512] [--per_switch=16] [--cables=2] [--out=FILE.json]
        [--png=FILE.png] [--json]

Distributed loop networks of 2^q switches (a ring of them, and a grid) beside a fat tree with full
bandwidth, whose messages follow D-mod-k or a hash. Times are over those of a ring on the fat tree
for a vector of the same size, which Nguyen and Wahib normalise to. `jaxcomm.plan` reads the pairs
from the functions that give the programs theirs; `tests/plan/simgrid.json` has what SimGrid says.
The cables of a shortcut share its messages evenly. `over bound` is for the bytes that leave a
switch, beside all of its shortcuts evenly full, or the cables of its hosts.
"""

import argparse
import datetime
import json
import math
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.arguments import at_least_zero, count, new_file
from jaxcomm.collectives.algorithms import Algorithm, halving_doubling, ring
from jaxcomm.plan import Model, Simulation, Topology
from jaxcomm.plan.fabrics import dln, dln_2d, fat_tree, rate_of
from jaxcomm.plan.simulate import total

SIZES = [2**k for k in range(16, 31, 2)]  # bytes of the vector
SHOWN = [2**20, 2**24, 2**26, 2**30]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--devices", type=count, default=512)
    parser.add_argument("--per_switch", type=count, default=16, help="devices of a switch")
    parser.add_argument("--cables", type=count, default=2, help="of a shortcut")
    parser.add_argument("--rate", default="100Gbit", help="of a cable")
    parser.add_argument(
        "--latency", type=at_least_zero, default=1.0, help="microseconds for a message"
    )
    parser.add_argument("--hop", type=at_least_zero, default=0.1, help="microseconds for each link")
    parser.add_argument("--out", type=new_file, help="a file for the rows, as JSON")
    parser.add_argument("--png", type=new_file, help="a file for the plot")
    parser.add_argument("--json", action="store_true", help="print the rows as the last line")
    args = parser.parse_args()
    start = time.perf_counter()
    try:
        rows = simulated(args)
    except ValueError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    show(rows, args)
    print(f"simulated in {time.perf_counter() - start:.1f} s")
    if args.out:
        Path(args.out).write_text(json.dumps({**circumstances(), "rows": rows}, indent=1) + "\n")
    if args.png:
        draw(rows, args)
    if args.json:
        print(json.dumps(rows))
    return 0


def circumstances() -> dict[str, Any]:
    """What made the rows."""
    return {
        "command": " ".join(["python -m benchmarks.simulate", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "scipy")},
        },
    }


def simulated(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each network and algorithm."""
    model = Model(args.latency * 1e-6, args.hop * 1e-6)
    rows = []
    for made, algorithms, grid in cases(args):
        simulation = Simulation(made, model)
        for name, algorithm in algorithms.items():
            costs = simulation.costs(algorithm)
            row: dict[str, Any] = {"network": made.name, "algorithm": name}
            row["ms"] = {str(size): 1e3 * total(costs, size) for size in SIZES}
            if grid and name not in ("ring", "far first"):
                row["over_bound"] = over_bound(costs, grid, args)
            rows.append(row)
    reference = rows[0]["ms"]
    for row in rows:
        row["normalised"] = {size: ms / reference[size] for size, ms in row["ms"].items()}
    return rows


Case = tuple[Topology, dict[str, Algorithm], tuple[int, ...]]


def cases(args: argparse.Namespace) -> list[Case]:
    """The networks, what runs on them, and how switches are joined; the reference comes first."""
    n, z, rate = args.devices, args.per_switch, rate_of(args.rate)
    if n < 2 * z or n & (n - 1) or z & (z - 1):
        raise ValueError(
            "--devices and --per_switch are powers of two, with at least two switches, "
            f"got {n} and {z}."
        )
    if rate is None:
        raise ValueError("--rate has to be limited: without a limit nothing takes time.")
    switches, shortcut = n // max(z, 1), args.cables * rate
    plain: dict[str, Algorithm] = {
        "ring": ring(),
        "near first": halving_doubling(),
        "far first": halving_doubling("far_first"),
    }
    found: list[Case] = [
        (fat_tree("fat tree, D-mod-k", n, rate, z), plain, ()),
        (fat_tree("fat tree, hashed", n, rate, z, routing="hashed"), plain, ()),
    ]
    near = 1 << (switches.bit_length() - 1) // 2
    for made, grid in (
        (dln("DLN", n, rate, z, 1, shortcut), (switches,)),
        (dln_2d("2-D DLN", n, rate, z, None, 1, shortcut), (near, switches // near)),
    ):
        across: dict[str, Algorithm] = {
            "shifted": halving_doubling("shifted", z),
            "spread": halving_doubling("spread", z, grid),
        }
        if len(grid) > 1:
            across["shifted, a dimension at a time"] = halving_doubling("shifted", z, grid)
        found.append((made, plain | across, grid))
    return found


def over_bound(costs: Any, grid: tuple[int, ...], args: argparse.Namespace) -> float:
    """Time between switches, without latency, over that of all shortcuts evenly used."""
    z, switches = args.per_switch, math.prod(grid)
    shortcuts = sum(2 * (n.bit_length() - 1) - 1 for n in grid)
    first = z.bit_length() - 1
    byte = 8e-6 / (rate_of(args.rate) or math.inf)
    across = sum(cost.per_byte.max() * step.share for cost, step in costs[first : len(costs) // 2])
    return across / byte / ((switches - 1) / (z * switches) * max(1, z / (shortcuts * args.cables)))


def show(rows: list[Any], args: argparse.Namespace) -> None:
    """The table, in Markdown."""
    print(
        f"{args.devices} devices, {args.per_switch} on a switch, {args.cables} cables a shortcut, "
        f"{args.rate}, {args.latency:g} us a message, {args.hop:g} us a link"
    )
    columns = [f"{size >> 20} MiB" for size in SHOWN]
    print("| network | algorithm | " + " | ".join(columns) + " | of plain | over bound |")
    print("|---|---|" + "---|" * (len(columns) + 2))
    plain = {r["network"]: r["ms"] for r in rows if r["algorithm"] == "near first"}
    for row in rows:
        shown = " | ".join(f"{row['normalised'][str(size)]:.3f}" for size in SHOWN)
        of_plain = row["ms"][str(2**26)] / plain[row["network"]][str(2**26)]
        over = f"{row['over_bound']:.2f}" if "over_bound" in row else ""
        print(f"| {row['network']} | {row['algorithm']} | {shown} | {of_plain:.3f} | {over} |")


def draw(rows: list[Any], args: argparse.Namespace) -> None:
    """Normalised times over sizes, a panel for each loop network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    networks = ["DLN", "2-D DLN"]
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    styles = {"near first": "o-", "shifted": "s-", "spread": "^-", "ring": "x:"}
    for network, axes in zip(networks, panels, strict=True):
        for row in rows:
            if row["network"] != network or row["algorithm"] not in styles:
                continue
            sizes = [s for s in SIZES if s >= 2**20]
            times = [row["normalised"][str(size)] for size in sizes]
            axes.plot(
                [size / 2**20 for size in sizes],
                times,
                styles[row["algorithm"]],
                label=row["algorithm"],
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks([size / 2**20 for size in SIZES if size >= 2**20])
        axes.set_xticklabels([str(size >> 20) for size in SIZES if size >= 2**20])
        axes.set_xlabel("vector, MiB")
        axes.set_title(f"{network}, {args.devices} devices")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("time over a ring on a fat tree")
    panels[0].set_ylim(bottom=0)
    panels[1].legend(loc="lower right")
    figure.savefig(args.png, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
