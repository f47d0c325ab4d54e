"""The planner's predictions beside what real processes need on real networks.

    python -m benchmarks.planner [--networks=star,clusters,...] [--hosts=4,8] [--devices=1]
        [--rates=100,300,1000] [--sizes=245760,1966080] [--methods=...] [--repeats=3] [--measured=3]
        [--out=JSON]
    python -m benchmarks.planner --report [--out=JSON] [--png=PNG] [--json]

On each network (`benchmarks.netlab`; needs root) the processes probe messages and codes, and then
exchange gradients by every method, in turn. What `--out` has already is not measured again. The
report compares predictions, which know the topology, the probe and nothing else, with the medians.

A choice is the planner's, among the methods of a quality: of those within 2 % of the least time
that it predicts, the one of the best quality, and of equals the default. It is good if it took at
most 1.05 of the fastest measured one. `all timed` counts the good choices of one who takes the
fastest of all methods in the odd repeats, judged by the even ones: times vary, so not even these
are all good. `leaders timed` is the same of the methods that `jaxcomm.plan.timed` times, those that
are predicted to be the fastest. Networks in TUNED were looked at while the model was made; the
others are reported on alone.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.arguments import count, new_file, positive, several, values
from benchmarks.choices import as_method, choices, leaders_choices, load_of, timed_choices
from benchmarks.netlab.measuring import RESULTS, Lab, circumstances, guarded
from benchmarks.netlab.methods import Exchange
from benchmarks.netlab.network import Network
from benchmarks.netlab.worker import Jax, measure
from jaxcomm import plan
from jaxcomm.plan.costs import Costs
from jaxcomm.plan.predict import ERRORS, Prediction, error_of, kind_of, predictions

NAME = "benchmarks.planner"
# Hierarchical ones come last: networks of one level have none, and programs are numbered.
METHODS = (
    "float32/native",
    "float32/ring",
    "float32/halving_doubling",
    "bfloat16/direct",
    "bfloat16/ring",
    "int8/direct",
    "int8/ring",
    "cnat/direct",
    "cnat/ring",
    "cnat/two_way_ring",
    "int4/direct",
    "scaled_sign/direct",
    "vote/direct",
    "vote/ring",
    "vote/two_way_ring",
    "vote/halving_doubling",
    "vote/circulant",
    "oktopk",
    "topk_allgather",
    "powersgd1",
    "powersgd4",
    "float32/hierarchical",
    "bfloat16/hierarchical",
    "vote/hierarchical",
)
# Between hosts of several devices, which the hierarchical ones add up first.
METHODS_OF_HOSTS = (
    "float32/native",
    "float32/ring",
    "bfloat16/direct",
    "bfloat16/hierarchical",
    "int8/direct",
    "int8/hierarchical",
    "cnat/hierarchical",
    "int4/hierarchical",
    "scaled_sign/hierarchical",
    "vote/direct",
    "vote/hierarchical",
    "oktopk",
    "topk_allgather",
    "powersgd1",
    "powersgd4",
)
TUNED = ("star", "clusters")
Case = tuple[dict[str, Any], dict[str, Prediction]]  # as it was measured, and as it was predicted


def main() -> int:
    args = parse()
    if args.worker:
        work(args)
        return 0
    return guarded("planner", lambda: (report if args.report else run)(args))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--networks", default="star,clusters,chain,chain_heterogeneous")
    parser.add_argument("--hosts", type=several(count), default="4,8")
    parser.add_argument("--devices", type=count, default=1, help="of each host")
    parser.add_argument("--rates", default="100,300,1000", help="Mbit/s of the links")
    parser.add_argument(
        "--sizes", type=several(values), default="245760,1966080", help="values of the gradients"
    )
    parser.add_argument("--methods", help="separated by ,; all if left out")
    parser.add_argument("--repeats", type=count, default=3, help="at least")
    parser.add_argument("--measured", type=positive, default=3, help="seconds of each method")
    parser.add_argument("--seconds", type=positive, default=900, help="after which a run is ended")
    parser.add_argument("--out", type=new_file, help="a JSON file; of --report, planner.json")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--png", type=new_file, help="a plot of the report")
    parser.add_argument("--json", action="store_true", help="the summary as the last line")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--costs", help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    """Measures what is missing; a case is a network and a size."""
    known = METHODS if args.devices == 1 else METHODS_OF_HOSTS
    args.methods = args.methods or ",".join(known)
    if unknown := set(args.methods.split(",")) - set(known):
        raise ValueError(f"unknown method {min(unknown)!r}; there are {', '.join(known)}.")
    if args.repeats < 2:
        raise ValueError(f"--repeats is at least 2: half choose, half judge; got {args.repeats}.")
    names, rates = args.networks.split(","), args.rates.split(",")
    with tempfile.TemporaryDirectory(prefix="planner-") as folder:
        for n, size, name, rate in itertools.product(args.hosts, args.sizes, names, rates):
            case = {"network": name, "hosts": n, "devices": args.devices, "rate": rate}
            case["size"] = size
            kept = read(args.out) if args.out else {"cases": []}
            if any(is_same(old, case) for old in kept["cases"]):
                print(f"{title_of(case)}: {args.out} has it")
            else:
                # Programs know the number of hosts and the size, and no network.
                programs = Path(folder, f"{n}-{size:g}")
                programs.mkdir(exist_ok=True)
                measured = measured_on(case, args, programs)
                kept = {**kept, **circumstances(NAME), "cases": [*kept["cases"], measured]}
                if args.out:
                    args.out.write_text(json.dumps(kept, indent=1) + "\n")
                print(summary_of(measured), flush=True)


def read(path: str | Path) -> dict[str, Any]:
    """What the file has."""
    found = json.loads(Path(path).read_text()) if Path(path).exists() else {"cases": []}
    for case in found["cases"]:
        case.setdefault("devices", 1)  # older files do not say it
    return found


def is_same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    keys = ("network", "hosts", "devices", "rate", "size")
    return all(str(a[key]) == str(b[key]) for key in keys)


def title_of(case: dict[str, Any]) -> str:
    """A line about its network and size."""
    hosts = f"{case['hosts']} {hosts_of(case['devices']) or 'hosts'}"
    return f"{case['network']}, {hosts}, {case['rate']} Mbit/s, {case['size']:g} values"


def hosts_of(devices: int) -> str:
    """What is said of hosts of several devices; nothing of others."""
    return f"hosts of {devices} devices" if devices > 1 else ""


def cluster_of(case: dict[str, Any]) -> plan.Cluster:
    """What the planner knows of the network; with default costs until they are measured."""
    settings = {"hosts": case["hosts"], "rate": case["rate"], "nodes.devices": case["devices"]}
    costs = Costs(**case["costs"]) if "costs" in case else None
    return plan.load_cluster(case["network"], settings, costs)


def measured_on(case: dict[str, Any], args: argparse.Namespace, programs: Path) -> dict[str, Any]:
    """The case with its costs and rows."""
    made = plan.load(case["network"], hosts=case["hosts"], rate=case["rate"])
    command = [sys.executable, "-m", NAME, "--worker", f"--methods={args.methods}"]
    command += [f"--networks={case['network']}", f"--hosts={case['hosts']}"]
    command += [f"--devices={args.devices}"]
    command += [f"--rates={case['rate']}", f"--sizes={case['size']}", f"--repeats={args.repeats}"]
    command += [f"--measured={args.measured}"]
    with tempfile.TemporaryDirectory() as folder, Network(made) as network:
        path = Path(folder, "costs.yaml")
        command.append(f"--costs={path}")
        rows = Lab(network).rows(command, args.seconds, programs=str(programs))
        costs = dataclasses.asdict(plan.read_costs(path))
    kept = ("method", "ms", "all_ms", "cpu_ms", "floor_ms", "bytes_busiest_link")
    rows = [{name: row[name] for name in kept} for row in rows]
    return {**case, "costs": costs, "rows": rows}


def work(args: argparse.Namespace) -> None:
    """What one host does."""
    import jax

    import jaxcomm

    jax.config.update("jax_num_cpu_devices", args.devices)
    together = Jax()
    case = {"network": args.networks, "hosts": args.hosts[0], "rate": args.rates}
    cluster = cluster_of(case | {"devices": args.devices})
    costs = plan.probe(cluster=cluster)
    if together.rank == 0:
        costs.save(args.costs)
    jax.set_mesh(jaxcomm.data_mesh())
    shapes = {f"layer{i:02}": shape for i, shape in enumerate(load_of(args.sizes[0]).shapes)}
    names = args.methods.split(",")
    if cluster.levels is None:
        names = [name for name in names if not name.endswith("/hierarchical")]
    if args.devices > 1:  # by hosts is what no algorithm stands for
        cases = [Exchange(name.removesuffix("/hierarchical"), shapes) for name in names]
        for exchange, name in zip(cases, names, strict=True):
            by_hosts = name.endswith("/hierarchical")
            exchange.row["method"] = f"{name}/{args.devices}" if by_hosts else name
    else:
        cases = [Exchange(name, shapes, levels=cluster.levels) for name in names]
    measure(cases, together, args.repeats, args.measured)


def predicted(case: dict[str, Any]) -> dict[str, Prediction]:
    """What the planner says of each measured method."""
    room = cluster_of(case)
    chosen = [as_method(row["method"]) for row in case["rows"]]
    found = predictions(room, load_of(case["size"]), chosen=chosen)
    by_method = {row.method: row for row in found}
    return {row["method"]: by_method[as_method(row["method"])] for row in case["rows"]}


def milliseconds(found: dict[str, Prediction]) -> dict[str, float]:
    """Of each method's exchange."""
    return {name: 1e3 * row.exchange for name, row in found.items()}


def summary_of(case: dict[str, Any]) -> str:
    """A case as a table."""
    found = predicted(case)
    times = milliseconds(found)
    lines = [title_of(case)]
    for row in case["rows"]:
        ratio = times[row["method"]] / row["ms"]
        lines.append(f"  {row['method']:24}{row['ms']:9.1f} ms, predicted {ratio:6.2f} of it")
    for choice in choices(case, found, cluster_of(case)):
        line = f"  {choice.quality:10} choice {choice.method:20} {choice.over:.2f} of the best"
        lines.append(line)
    return "\n".join(lines)


def report(args: argparse.Namespace) -> None:
    """Errors by algorithm, on tuned networks and others, and how often the choice was good."""
    from benchmarks.tables import table

    path = args.out or RESULTS / "planner.json"
    kept = read(path)
    if not kept["cases"]:
        raise ValueError(f"{path} has no network that was measured.")
    summary = summarised(kept)
    print(*table(*errors_table(summary)), "", *table(*choices_table(summary)), sep="\n")
    if args.png:
        draw(kept, args.png)
    if args.json:
        print(json.dumps(summary))


def summarised(kept: dict[str, Any]) -> dict[str, Any]:
    """Errors by groups of networks, choices by size and devices, as far as there are cases."""
    groups: dict[str, list[Case]] = {}
    sizes: dict[tuple[int, float], list[Case]] = {}
    for case in kept["cases"]:
        pair = case, predicted(case)
        groups.setdefault(group_of(case), []).append(pair)
        sizes.setdefault((case["devices"], -float(f"{case['size']:.2g}")), []).append(pair)
    return {
        "errors": {group: errors_in(cases) for group, cases in sorted(groups.items())},
        "choices": [choices_of(-key[1], key[0], sizes[key]) for key in sorted(sizes)],
    }


def group_of(case: dict[str, Any]) -> str:
    """What a network has in common with others."""
    alone = "tuned" if case["network"] in TUNED else "others"
    return hosts_of(case["devices"]) or alone


def choices_of(size: float, devices: int, cases: list[Case]) -> dict[str, Any]:
    """Of the choices at a size: how many were good, and which was worst."""
    found = [c for case, rows in cases for c in choices(case, rows, cluster_of(case))]
    leaders = [c for case, rows in cases for c in leaders_choices(case, rows, cluster_of(case))]
    worst = max(found, key=lambda choice: choice.over)
    return {
        "size": size,
        "devices": devices,
        "networks": len(cases),
        "choices": len(found),
        "good": sum(choice.over <= 1.05 for choice in found),
        "leaders_timed": sum(choice.over <= 1.05 for choice in leaders),
        "leaders_worst": max(choice.over for choice in leaders),
        "timed": sum(c.over <= 1.05 for case, _ in cases for c in timed_choices(case)),
        "worst": worst.over,
        "chosen": worst.method,
        "best": worst.best,
    }


def errors_in(cases: list[Case]) -> dict[str, Any]:
    """Of each algorithm, the share of measurements within the error of their predictions."""
    ratios: dict[str, list[float]] = {name: [] for name in ERRORS}
    within = dict.fromkeys(ERRORS, 0)
    for case, found in cases:
        times = milliseconds(found)
        for row in case["rows"]:
            method = as_method(row["method"])
            ratio = times[row["method"]] / row["ms"]
            ratios[kind_of(method)].append(ratio)
            within[kind_of(method)] += abs(1 / ratio - 1) <= error_of(method, case["size"])
    return {
        name: {
            "rows": len(found),
            "median_ratio": statistics.median(found),
            "median_error": statistics.median(abs(1 / r - 1) for r in found),
            "within": within[name] / len(found),
            "error": ERRORS[name],
        }
        for name, found in ratios.items()
        if found
    }


def errors_table(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and cells: how far predictions are from measurements."""
    body = [
        [
            {"own": "sparse and low rank"}.get(algorithm, algorithm),
            group,
            str(row["rows"]),
            f"{row['median_ratio']:.2f}",
            f"{100 * row['median_error']:.0f} %",
            f"{100 * row['within']:.0f} % of +-{100 * row['error']:.0f} %",
        ]
        for group, at in summary["errors"].items()
        for algorithm, row in at.items()
    ]
    head = ["algorithm", "networks", "predictions", "predicted / measured", "error", "within"]
    return head, body


def choices_table(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and cells: how often the choice was good, by size."""
    body = [
        [
            ", ".join(filter(None, [f"{row['size'] / 1e6:g} M", hosts_of(row["devices"])])),
            str(row["networks"]),
            f"{row['good']} of {row['choices']}",
            f"{row['leaders_timed']} of {row['choices']}",
            f"{row['timed']} of {row['choices']}",
            f"{row['worst']:.2f}",
            f"`{row['chosen']}`, not `{row['best']}`" if row["chosen"] != row["best"] else "",
        ]
        for row in summary["choices"]
    ]
    head = [
        "values",
        "networks",
        "good choices",
        "leaders timed",
        "all timed",
        "worst choice, over the best",
        "it took, not the fastest",
    ]
    return head, body


def draw(kept: dict[str, Any], path: str) -> None:
    """Predicted over measured times."""
    from benchmarks.plots import plot_predictions

    points: dict[str, tuple[list[float], list[float]]] = {}
    for case in kept["cases"]:
        times = milliseconds(predicted(case))
        for row in case["rows"]:
            name = kind_of(as_method(row["method"]))
            x, y = points.setdefault({"own": "sparse and low rank"}.get(name, name), ([], []))
            x.append(row["ms"])
            y.append(times[row["method"]])
    plot_predictions(path, points)


if __name__ == "__main__":
    sys.exit(main())
