"""The tables of the pages in PAGES, and the plots beside them, from what benchmarks have kept.

    python -m benchmarks.tables [--check]

A table stands between `<!-- table NAME -->` and `<!-- end -->`, and is replaced. So is the file
that says which implementation was the fastest. `--check` writes nothing, and fails if a table or
this file is not what the results say.
"""

import argparse
import functools
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import digits, links, on_gpu, planner, plots, take, time_to_loss
from benchmarks.arguments import existing_file
from benchmarks.links import NAMES, RATES, over, table, timed_steps
from benchmarks.pareto import results as front
from jaxcomm.kernels._fastest import FILE as FASTEST

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [
    ROOT / "README.md",
    RESULTS / "gpu_overlap.md",
    *(
        ROOT / "docs" / name
        for name in ("choose.md", "kernels.md", "measurements.md", "networks.md", "sharded.md")
    ),
]
Lines = list[str]
PLANNER = str(RESULTS / "planner.json")
TRIED = "rate (of how many)"


def table_or(head: list[str], rows: list[list[str]], text: str) -> Lines:
    """A table, or a text in its place if it has no row."""
    return table(head, rows) if rows else [text]


def parts(name: str) -> dict[str, Any]:
    """The parts of an experiment."""
    return json.loads((RESULTS / f"{name}.json").read_text())["parts"]


def majority() -> Lines:
    """ms of a vote on each topology; empty where it was not measured."""
    found = parts("seed_majority")
    at = {part: {row["name"]: row for row in found[part]["rows"]} for part in found}
    rows = []
    for method, name in MAJORITY.items():
        known = (rows_.get(method) for rows_ in at.values())
        rows.append([name, *(f"{row['ms']:.0f}{over(row)}" if row else "" for row in known)])
    ms = [{name: row["ms"] for name, row in rows_.items()} for rows_ in at.values()]
    for kind, what in (("byte", "a byte a bit"), ("vote", "true bits")):
        one, ring = f"{kind}/1-bit", f"{kind}/ring"
        ratios = [f"{of[one] / of[ring]:.2f}" if one in of else "" for of in ms]
        rows.append([f"ring over 1-bit, {what}", *ratios])
    best = [of["vote/ring"] / min(of[m] for m in of if m.startswith("vote/")) for of in ms]
    rows.append(["best vote over our ring", *(f"{ratio:.2f}" for ratio in best)])
    return table(["", *at], rows)


MAJORITY = {
    "float32/ring": "float32 ring (XLA's)",
    "bfloat16/ring": "bfloat16 ring",
    "byte/1-bit": "1-bit, a byte a bit",
    "byte/ring": "vote by ring, a byte a bit",
    "vote/1-bit": "1-bit, true bits",
    "vote/direct": 'vote, `"direct"`',
    "vote/ring": 'vote, `"ring"`',
    "vote/two_way_ring": 'vote, `"two_way_ring"`',
    "vote/halving_doubling": 'vote, `"halving_doubling"`',
    "vote/circulant": 'vote, `"circulant"`',
    "vote/hierarchical": "vote, `hierarchical`, direct in both halves",
    "vote/two_clusters": 'vote, `"two_clusters"`',
}


def ethernet() -> Lines:
    """Efficiencies, in per cent."""
    rows = []
    for part, found in parts("seed_ethernet").items():
        for row in found["rows"][1:]:
            paper = f"{row['paper']:.1f}" if row["paper"] else ""
            efficiencies = [f"{row[name]:.1f}" for name in ("efficiency", "bytes_allow")]
            rows.append([part, row["name"], f"{row['ms']:.0f}", *efficiencies, paper])
    return table(
        ["links a host", "exchange", "step, ms", "efficiency, %", "bytes allow", "paper"], rows
    )


def cnat() -> Lines:
    """Millions of elements a second."""
    found = aggregations()
    rows = []
    for cells in zip(*found.values(), strict=True):
        shown = [f"{median(c) / 1e6:.2f} ({c['of_float32']:.2f})" for c in cells]
        rows.append([cells[0]["method"], *shown])
    return table(["", *found], rows)


def aggregations() -> dict[str, Any]:
    """Part -> rows, of what was timed without training."""
    return {part: at["rows"] for part, at in parts("seed_cnat").items() if part != "train"}


def cnat_train() -> Lines:
    """Time to an accuracy."""
    found = parts("seed_cnat")["train"]
    names = ("seed", "seconds", "steps", "test_accuracy", "step_ms", "compute_ms")
    rows = [
        [row["codec"], *("not" if row[n] is None else f"{row[n]:.4g}" for n in names)]
        for row in found["rows"]
    ]
    at = f"seconds to {100 * found['accuracy']:.0f} %"
    head = ["", "seed", at, "steps", "accuracy at the end", "step, ms", "computing, ms"]
    return table(head, rows)


def training() -> Lines:
    """A transformer's loss, and the time that training took."""
    means = time_to_loss.means(time_to_loss.rows_of(parts("time_to_loss")))
    first = means[0]
    rows = []
    for row in means:
        reached = row["until"]
        rows.append(
            [
                time_to_loss.TITLES.get(row["method"], row["method"]),
                f"{row['bytes']:.2f}",
                f"{row['step_ms']:.0f}",
                str(row["steps"]),
                f"{row['seconds']:.0f}",
                f"{row['loss']:.3f}",
                "not" if reached is None else f"{reached:.0f}",
                "" if reached is None else f"{first['until'] / reached:.1f}x",
            ]
        )
    head = ["", "bytes", "step, ms", "steps", "seconds", "test loss at the end"]
    return table([*head, "seconds to float32's late loss", "as fast"], rows)


def median(row: dict[str, Any]) -> float:
    return statistics.median(row["elements_per_second"])


def oktopk() -> Lines:
    """Volume, the paper's, and ms."""
    found = {int(part.split()[0]): at["rows"] for part, at in parts("seed_oktopk").items()}
    rows = []
    by_name = [{row["name"]: row for row in rows_of} for rows_of in found.values()]
    for name in by_name[0]:
        cells = [of[name] for of in by_name]
        volume = [f"{c['volume']:.2f}" for c in cells]
        paper = [" to ".join(f"{v:.2f}" for v in c["paper"]) for c in cells]
        rows.append([name, "volume", *volume])
        rows.append(["", "paper", *paper])
        rows.append(["", "ms", *(f"{c['ms']:.0f}" for c in cells)])
    return table(["", "", *(f"N = {N}" for N in found)], rows)


def dln() -> Lines:
    """ms of each order, and what the simulation says."""
    (found,) = parts("seed_dln").values()
    plain = next(row["ms"] for row in found["rows"] if row["name"] == "near_first")
    rows = []
    for row in found["rows"]:
        times = [row[name] for name in ("ms", "predicted_ms", "predicted_half_duplex_ms")]
        cells = [f"{ms:.0f}" for ms in times]
        rows.append([row["name"], *cells, f"{row['ms'] / plain:.3f}"])
    return table(["", "ms", "predicted", "predicted, pairs take turns", "over near first"], rows)


def compile_time() -> Lines:
    """Seconds, and times the float32 mean's."""
    rows = parts("compile_time")["compile time"]["rows"]
    sizes = list(rows[0]["seconds"])
    first, body = rows[0]["seconds"], []
    for row in rows:
        at = row["seconds"]
        cells = [f"{at[size]:.1f} ({at[size] / first[size]:.0f})" for size in sizes]
        body.append([NAMES.get(row["method"], row["method"]), *cells])
    return table(["", *sizes], body)


def pareto(task: str) -> Lines:
    """Bytes and losses of the methods for a task, at the chosen rates."""
    rows = [row for row in front.read(front.FOLDER) if row["task"] == task]
    body = []
    for line in front.summaries(rows):
        own = [
            row
            for row in rows
            if row["chosen"] and all(row[key] == line[key] for key in ("task", "method"))
        ]
        worse = [row["minus_float32"] for row in sorted(own, key=lambda row: row["seed"])]
        body.append(
            [
                line["method"],
                line["optimizer"],
                f"{line['bytes_per_step']:.2f}",
                f"{line['loss']:.3f}",
                ", ".join("?" if nats is None else f"{nats:+.3f}" for nats in worse),
                f"{line['rate']:g} ({line['rates']})",
            ]
        )
    return table(["method", "optimizer", "bytes", "loss", "minus float32", TRIED], body)


@functools.cache
def planned() -> dict[str, Any]:
    """What the planner's predictions are worth on the networks that were measured."""
    return planner.summarised(planner.read(PLANNER))


def what_to_take() -> Lines:
    """Bytes, losses and speed of what users are told to take, and what marks in cells mean."""
    head, rows = take.rows(timed_steps(), RATES[:3])
    marks = "".join(cell for row in rows for cell in row[3:])
    return table(head, rows) + ["", *(text for mark, text in take.MARKS if mark in marks)]


def powersgd() -> Lines:
    """Losses of our PowerSGD and of PyTorch's, each at its best rate."""
    rows = json.loads((RESULTS / "powersgd_torch.json").read_text())["rows"]
    runs: dict[tuple[int, str], dict[float, list[dict[str, Any]]]] = {}
    for row in rows:
        at = runs.setdefault((row["rank"], row["side"]), {})
        at.setdefault(row["rate"], []).append(row)

    def losses(own: list[dict[str, Any]], name: str) -> str:
        each = [row[name] for row in own]
        return f"{statistics.mean(each):.3f} ({', '.join(f'{loss:.3f}' for loss in each)})"

    body = []
    for (rank, side), at in runs.items():
        best = min(at, key=lambda rate, at=at: sum(row["test_loss"] for row in at[rate]))
        name = {0: "float32", -1: "no exchange"}.get(rank, f"rank {rank}")
        cells = [name, side, f"{at[best][0]['bytes_per_step']:.2f}", f"{best:g} ({len(at)})"]
        body.append(cells + [losses(at[best], of) for of in ("training_loss", "test_loss")])
    return table(["", "", "bytes", TRIED, "training loss", "test loss"], body)


def simulated() -> Lines:
    """Times on loop networks and fat trees over those of a ring on the fat tree."""
    rows = json.loads((RESULTS / "simulate_512.json").read_text())["rows"]
    sizes = [2**20, 2**24, 2**26, 2**30]
    plain = {row["network"]: row["ms"] for row in rows if row["algorithm"] == "near first"}
    body = []
    for row in rows:
        of_plain = row["ms"][str(2**26)] / plain[row["network"]][str(2**26)]
        cells = [f"{row['normalised'][str(size)]:.3f}" for size in sizes] + [f"{of_plain:.3f}"]
        over = f"{row['over_bound']:.2f}" if "over_bound" in row else ""
        body.append([row["network"], row["algorithm"], *cells, over])
    head = [f"{size >> 20} MiB" for size in sizes]
    return table(["network", "algorithm", *head, "64 MiB, over near first", "over bound"], body)


def milliseconds(name: str) -> Lines:
    """What an experiment has timed."""
    (found,) = parts(name).values()
    return table(["", "ms"], [[row["name"], f"{row['ms']:.0f}"] for row in found["rows"]])


def split_muon() -> Lines:
    """Bytes and ms of one step of Muon for matrices that are split, at each rate."""
    found = parts("split_muon")
    rates = sorted(found, key=int)
    columns = [found[rate]["rows"] for rate in rates]
    body = []
    for row in zip(*columns, strict=True):
        sent = row[0]["bytes_busiest_link"] / found[rates[0]]["params"]
        body.append([row[0]["name"], f"{sent:.2f}", *(f"{cell['ms']:.0f}" for cell in row)])
    return table(["", "bytes a weight", *(f"ms at {rate} Mbit/s" for rate in rates)], body)


TABLES: dict[str, Callable[[], Lines]] = {
    "take": what_to_take,
    "split_muon": split_muon,
    "chains": lambda: table(*take.chains(RATES[:3])),
    "digits": lambda: table(*digits.alike()),
    "digits_by_label": lambda: table_or(*digits.by_label(), "None of these runs is kept yet."),
    "gpu_kernels": lambda: table(*on_gpu.kernels()),
    **{f"gpu_steps_{x}": lambda x=x: table(*on_gpu.steps(x)) for x in ("h100", "h200")},
    "overlap_h100": lambda: table(*on_gpu.overlap("h100")),
    "overlap_a10": lambda: table(*on_gpu.overlap("a10")),
    **{
        x: lambda x=x: table(*getattr(on_gpu, x)())
        for x in ("overlap_scanned", "overlap_hsdp", "due")
    },
    **{x: lambda x=x: milliseconds(x) for x in ("overlap_cpu", "due_cpu")},
    "simulated": simulated,
    "planner": lambda: table(*planner.errors_table(planned())),
    "planner_choices": lambda: table(*planner.choices_table(planned())),
    "powersgd": powersgd,
    "pareto": functools.partial(pareto, "gpt_small"),
    "pareto_gpt": functools.partial(pareto, "gpt"),
    "pareto_lstm": functools.partial(pareto, "lstm"),
    "pareto_lstm_nesterov": functools.partial(pareto, "lstm_nesterov"),
    "pareto_resnet20": functools.partial(pareto, "resnet20"),
    "pareto_resnet20_nesterov": functools.partial(pareto, "resnet20_nesterov"),
    "compile_time": compile_time,
    "dln": dln,
    **{x: getattr(links, x) for x in ("exchanges", "steps", "hosts", "beside_torch", "steps_8m")},
    "majority": majority,
    "ethernet": ethernet,
    "cnat": cnat,
    "cnat_train": cnat_train,
    "oktopk": oktopk,
    "training": training,
}
PLOTS: dict[str, Callable[[Path], None]] = {
    "allreduce_star4.png": lambda path: plots.plot_exchanges(path, timed_steps(), RATES[:3], NAMES),
    "step_time.png": lambda path: plots.plot_steps(path, timed_steps(), RATES[:3], NAMES),
    "seed_cnat.png": lambda path: plots.plot_cnat(path, aggregations()),
    "time_to_loss.png": lambda path: plots.plot_training(
        path, time_to_loss.rows_of(parts("time_to_loss")), time_to_loss.TITLES
    ),
    "planner.png": lambda path: planner.draw(planner.read(PLANNER), str(path)),
}


PLACE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.S)


def filled(page: str) -> str:
    """The page with its tables made anew."""
    return PLACE.sub(lambda m: f"{m[1]}\n" + "\n".join(TABLES[m[2]]()) + f"\n\n{m[3]}", page)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--page", type=existing_file, help="this one alone")
    args = parser.parse_args()
    wrong = 0
    for path in [args.page] if args.page else PAGES:
        page = path.read_text()
        new = filled(page)
        wrong += new != page
        if args.check and new != page:
            print(f"{path.name} is not what the results say: run python -m benchmarks.tables")
        if not args.check:
            path.write_text(new)
        for name, draw in PLOTS.items():
            if name in new and not args.check:
                draw(RESULTS / name)
    fastest = on_gpu.fastest()
    if args.check and FASTEST.read_text() != fastest:
        wrong += 1
        print(f"{FASTEST.name} is not what the results say: run python -m benchmarks.tables")
    if not args.check:
        FASTEST.write_text(fastest)
    return int(wrong > 0) if args.check else 0


if __name__ == "__main__":
    sys.exit(main())
