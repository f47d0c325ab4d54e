"""The flags that choose a network and a measurement on it, the same for every command."""

import argparse

from benchmarks.arguments import count, new_file, positive
from jaxcomm import plan


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that choose a network."""
    parser.add_argument("--topology", default="star", help="a name or a YAML file")
    parser.add_argument("--hosts", type=int, help="instead of the file's")
    parser.add_argument("--rate", help="of links in Mbit/s, instead of the file's")
    parser.add_argument("--links_per_host", type=int, help="instead of the file's")


def add_run_flags(parser: argparse.ArgumentParser, repeats: int, seconds: int = 600) -> None:
    """The flags of a measurement that starts itself on every host."""
    parser.add_argument("--repeats", type=count, default=repeats)
    parser.add_argument("--seconds", type=positive, default=seconds, help="until a run is ended")
    parser.add_argument("--out", type=new_file, help="a JSON file that the rows are kept in")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def chosen(args: argparse.Namespace) -> plan.Topology:
    """The topology that the flags ask for; ValueError for one that cannot be."""
    return plan.load(
        args.topology, hosts=args.hosts, rate=args.rate, links_per_host=args.links_per_host
    )
