"""What to use on a cluster: methods ranked, each by its fastest algorithm, the choice first.

    python -m jaxcomm.plan CLUSTER.yaml --params=25.6e6 --step-ms=234
        [--quality=exact|16bit|unbiased|any] [--optimizer=sgd|adam|muon] [--set NAME=VALUE ...]
        [--accumulate=N,...] [--costs=FILE.yaml] [--rows=N] [--keep-order] [--json]

CLUSTER.yaml is a file as described in `jaxcomm.plan.machines`, or the name of a topology. `--set`
changes it: nodes.nics=2, rate=10Gbit, link[s0,s1].bandwidth=1Gbit, device=gpu; the choice without
`--set` is shown too. The default `--quality` is 16bit; the choice among all methods is then shown
too, if it differs. `--optimizer` leaves out methods that lost accuracy with that optimizer. With
several numbers, `--accumulate` shows the choice for each, and the table for the first. `--costs` is
a file that `python -m jaxcomm.probe` has written.
"""

import argparse
import contextlib
import json
import signal
import sys

from jaxcomm import plan
from jaxcomm.plan.families import OPTIMIZERS, QUALITIES, QUALITY
from jaxcomm.plan.machines import path_of


def main() -> int:
    """Runs the command; returns its exit status."""
    args = _parse()
    try:
        _run(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> None:
    loads = [plan.workload(args.params, args.step_ms, n) for n in args.accumulate]
    costs = plan.read_costs(args.costs) if args.costs else None
    changes = dict(path_of(text) for text in args.set)
    if args.json and len(loads) > 1:
        raise ValueError(f"--json takes one number of --accumulate, got {len(loads)}.")

    def planned(
        changed: dict[str, str], load: plan.Workload, quality: str | None = args.quality
    ) -> plan.Plan:
        made = plan.load_cluster(args.cluster, changed, costs)
        reorder = not args.keep_order
        return plan.plan(made, load, quality, reorder=reorder, optimizer=args.optimizer)

    found = planned(changes, loads[0])
    if args.json:
        print(json.dumps(found.as_json()))
        return
    answer, *more = found.lines(args.rows)
    print(answer)
    if args.quality is None:
        every = planned(changes, loads[0], "any")
        if every.choice.method != found.choice.method:
            print(f"with --quality=any: {every.headline}")
    for load in loads[1:]:
        said = f"{planned(changes, load).headline} A step has {load.accumulate} microbatches."
        print(f"with --accumulate={load.accumulate}: {said}")
    if changes:
        with contextlib.suppress(ValueError):  # the file may be complete only with --set
            print(f"without --set: {planned({}, loads[0]).headline}")
    print("\n".join(more))


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        wrong = f"expected whole numbers such as 1,2,4,8, got {text!r}"
        raise argparse.ArgumentTypeError(wrong) from None


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxcomm.plan", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("cluster", help="a file, or the name of a topology")
    parser.add_argument("--params", type=float, required=True, help="the number of parameters")
    parser.add_argument("--step-ms", type=float, required=True, help="of a step without exchange")
    parser.add_argument("--quality", choices=QUALITIES, help=f"the default is {QUALITY}")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="that follows the exchange")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--accumulate", type=_numbers, default=[1], help="microbatches an exchange, such as 1,2,4,8"
    )
    parser.add_argument("--costs", help="a file written by jaxcomm.probe")
    parser.add_argument("--rows", type=int, default=20, help="at most, of the table")
    parser.add_argument("--keep-order", action="store_true", help="keep the order of the devices")
    parser.add_argument(
        "--json", action="store_true", help="print all methods and algorithms, the choice first"
    )
    return parser.parse_args()


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without an error
    sys.exit(main())
