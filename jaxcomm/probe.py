"""Measures what messages and codecs cost on these devices, in a file that the planner reads.

    python -m jaxcomm.probe [--out=costs.yaml] [--cluster=CLUSTER.yaml] [--simulate=N]
        [--coordinator=HOST:PORT --processes=N --process=I]

Run it in every process of a job. Without flags, and without a scheduler that jax knows, it runs as
one process with the devices of this machine. `--simulate=4` uses 4 simulated CPU devices. With a
cluster, it also measures which share of the links' rates messages reach.
"""

import argparse
import os
import re
import sys
from pathlib import Path

import jax

import jaxcomm
from jaxcomm import plan
from jaxcomm.plan.costs import SIZES
from jaxcomm.plan.files import pyyaml

# Where Open MPI, MPICH and Intel MPI, and PyTorch's launchers say how many processes they started.
SIZES_BY_STARTERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")


def main() -> int:
    """Runs the command; returns its exit status."""
    args = _parse()
    try:
        out = Path(args.out)
        if not args.process and (out.is_dir() or not out.parent.is_dir()):  # the first one writes
            raise ValueError(f"--out={out}: expected a file in a folder that exists.")
        pyyaml()  # before a minute of measuring
        if not args.coordinator and (args.processes, args.process) != (None, None):
            raise ValueError("--processes and --process need --coordinator=HOST:PORT.")
        if args.coordinator and not re.fullmatch(r".+:\d+", args.coordinator):
            raise ValueError(f"--coordinator={args.coordinator}: write HOST:PORT.")
        if args.coordinator and None in (args.processes, args.process):
            raise ValueError("--coordinator needs --processes=N and --process=I.")
        if args.simulate is not None:
            jaxcomm.simulate_devices(args.simulate)
        if args.coordinator:
            jax.distributed.initialize(args.coordinator, args.processes, args.process)
        else:
            _join_as_started()
        # Costs that the file names may be those that are about to be written.
        unused = plan.defaults("cpu")
        cluster = plan.load_cluster(args.cluster, costs=unused) if args.cluster else None
        costs = plan.probe(cluster=cluster)
    except (ValueError, OSError, ImportError) as error:
        print(f"probe: {error}", file=sys.stderr)
        return 2
    if jax.process_index() == 0:
        costs.save(args.out)
        _show(costs, args.out)
    return 0


def _join_as_started() -> None:
    """Joins the processes that a scheduler has started.

    Raises:
      ValueError: if jax cannot find the other processes; this one would probe itself alone.
    """
    started = [f"{n}={os.environ[n]}" for n in SIZES_BY_STARTERS if os.environ.get(n, "1") != "1"]
    if not started and "SLURM_STEP_ID" not in os.environ:
        return
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{' '.join(started) or 'SLURM'} says that this is one of several processes, but jax "
            f"cannot find the others ({error}); add --coordinator=HOST:PORT --processes=N "
            "--process=I"
        ) from error


def _show(costs: plan.Costs, path: str) -> None:
    ways = "one after the other" if costs.half_duplex else "at once"
    print(f"{costs.source}; written to {path}")
    print(f"a message takes {1e6 * costs.latency:.0f} us and {1e9 * costs.per_byte:.2f} ns a byte,")
    print(f"{costs.efficiency:.0%} of a link's rate; both ways between two devices go {ways}")
    small, full = SIZES
    print(f"  ns a value{small:>14,}{full:>11,} values")
    for family, (few, many) in sorted(costs.local.items(), key=lambda item: item[1][1]):
        print(f"  {family:16}{1e9 * few:8.2f}{1e9 * many:11.2f}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxcomm.probe", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", default="costs.yaml")
    parser.add_argument("--cluster", help="a file, or the name of a topology")
    parser.add_argument("--simulate", type=int, metavar="N", help="CPU devices in this process")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of the first process")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
