"""The flags that choose a network, the same for every command."""

import argparse

from jaxcomm import plan


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that choose a network."""
    parser.add_argument("--topology", default="star", help="a name or a YAML file")
    parser.add_argument("--hosts", type=int, help="instead of the file's")
    parser.add_argument("--rate", help="of links in Mbit/s, instead of the file's")
    parser.add_argument("--links_per_host", type=int, help="instead of the file's")


def chosen(args: argparse.Namespace) -> plan.Topology:
    """The topology that the flags ask for; ValueError for one that cannot be."""
    return plan.load(
        args.topology, hosts=args.hosts, rate=args.rate, links_per_host=args.links_per_host
    )
