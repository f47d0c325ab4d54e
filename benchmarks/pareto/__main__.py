"""Loss against bytes: every method with the optimizer recommended for it, at equally tuned rates.

    python -m benchmarks.pareto [--tasks=gpt_small] [--methods="float32;cnat"] [--seeds=0,1]
        [--rates=1 | --at=0.025] [--minutes=4] [--data_dir=DIR] [--results=DIR]
    python -m benchmarks.pareto --report [--tasks=...] [--methods=...] [--json] [--plot=PNG]

Four simulated devices in one process hold different parts of the data. Each method is trained at
its learning rates, a factor of two apart; the validation loss chooses one, and the test loss is
reported. Runs follow one another, the middle rates of all methods first. `--at` gives other rates;
where the best of a row was an end, committed runs have some more. A finished run is a file in
`benchmarks/results/pareto/`, which is not run again: `--results` names another folder to repeat it.

`--report` runs nothing: it shows the committed runs, of `--tasks` and `--methods` alone where they
are given. `--json` prints them as the last line: task, method, optimizer, rate, seed, loss (of the
test text, nats), bytes_per_step (bytes that a device sends in a step for each parameter, averaged
over the run), minus_float32 (the loss minus that of float32 at its chosen rate and the same seed,
with Nesterov's momentum or Muon where the row has it), chosen (whether this is the chosen rate).
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

from benchmarks.arguments import new_file, positive, several, whole
from benchmarks.pareto import results

USUAL = "gpt_small"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tasks", default="", help=f"of {', '.join(results.TITLES)}; {USUAL} is trained"
    )
    parser.add_argument("--methods", default="", help="names of rows, separate by ;")
    parser.add_argument("--seeds", type=several(whole), default="0,1")
    parser.add_argument(
        "--rates", type=int, choices=(1, 2, 3), default=3, help="how many: 1 is the middle one"
    )
    parser.add_argument("--at", type=several(positive), help="these rates, not those of a row")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no run starts later")
    parser.add_argument("--data_dir", default=None, help="of TensorFlow Datasets; TFDS_DATA_DIR")
    parser.add_argument("--results", type=Path, default=results.FOLDER)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--json", action="store_true", help="the rows as the last line")
    parser.add_argument("--plot", type=new_file, default=None, help="where a PNG is written")
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    """Runs what is missing."""
    import jaxcomm

    jaxcomm.simulate_devices(4)
    from benchmarks.pareto.rows import TABLES
    from benchmarks.pareto.tasks import TASKS
    from benchmarks.pareto.training import train

    began, tasks = time.monotonic(), split(args.tasks or USUAL, ",")
    chosen = split(args.methods, ";")
    check("task", tasks, list(TABLES))
    check("method", chosen, [name for task in tasks for name in TABLES[task]])
    several_rates = args.at or (1, 0, 2)[: args.rates]
    for seed, which in itertools.product(args.seeds, several_rates):
        for task in tasks:
            for name, method in TABLES[task].items():
                rate = which if args.at else method.rates[which]
                path = results.path(args.results, task, name, rate, seed)
                if path.exists() or (chosen and name not in chosen):
                    continue
                if time.monotonic() - began > 60 * args.minutes:
                    return
                row = {"task": task, "method": name, "optimizer": method.optimizer}
                row |= {"rate": rate, "seed": seed}
                row |= train(TASKS[task], method, rate, seed, args.data_dir)
                results.write(path, row)
                print(json.dumps(row), file=sys.stderr, flush=True)


def asked(rows: results.Rows, args: argparse.Namespace) -> results.Rows:
    """The finished runs of `--tasks` and `--methods`; without these all of them."""
    if not rows:
        print(f"pareto: --results={args.results} has no run", file=sys.stderr)
        raise SystemExit(2)
    for what, names in (("task", split(args.tasks, ",")), ("method", split(args.methods, ";"))):
        check(what, names, list(dict.fromkeys(row[what] for row in rows)))
        rows = [row for row in rows if row[what] in names or not names]
    return rows


def split(text: str, mark: str) -> list[str]:
    """The names in a text."""
    return [name for name in text.split(mark) if name]


def check(what: str, names: list[str], known: list[str]) -> None:
    """Ends the program with a line, and status 2, at a name that there is not."""
    for name in names:
        if name not in known:
            print(f"pareto: unknown {what} {name!r}; there are {'; '.join(known)}", file=sys.stderr)
            raise SystemExit(2)


def main() -> None:
    args = parse()
    if not args.report:
        run(args)
    rows = results.read(args.results)
    if args.report:
        rows = asked(rows, args)
    print(results.table(rows))
    if args.plot:
        results.plot(rows, args.plot)
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
