"""Runs a command on every host of a network of this machine's own.

    python -m benchmarks.netlab --topology=star [--hosts=4] [--rate=50] -- python -m train ...

Rates are Mbit/s, or texts such as 1Gbit and unlimited. Processes find each other by
`jax.distributed.initialize()`. The first failure ends all of them; so do Ctrl-C, SIGTERM and the
deadline. The network is removed in the end; what SIGKILL leaves is removed by the next run.

Needs root, iproute2, and the extra `netlab`.
"""

import argparse
import sys

from benchmarks.arguments import positive
from benchmarks.netlab.calibrate import calibrated
from benchmarks.netlab.flags import add_flags, chosen
from benchmarks.netlab.hosts import HostError, run_everywhere
from benchmarks.netlab.network import Network, NetworkError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.netlab", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_flags(parser)
    parser.add_argument("--seconds", type=positive, default=600, help="after which all is ended")
    parser.add_argument("command", nargs="+", help="after --")
    args = parser.parse_args()
    command = args.command
    if command[0] == "python":
        command = [sys.executable, *command[1:]]
    try:
        with Network(chosen(args)) as network:
            for (a, b), mbit in calibrated(network).items():
                print(f"{a} to {b}: {mbit:.1f} Mbit/s", flush=True)
            before = network.bytes_sent()
            printed = run_everywhere(network, command, args.seconds)
            after = network.bytes_sent()
    except (ValueError, NetworkError) as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except HostError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 1
    for host, text in zip(network.topology.hosts, printed, strict=True):
        print(f"{host}:")
        print("".join(f"  {line}\n" for line in text.splitlines()), end="")
    print("megabytes sent:")
    for (a, b, number), sent in sorted(after.items()):
        print(f"  {a} to {b} (link {number}): {(sent - before[a, b, number]) / 1e6:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
