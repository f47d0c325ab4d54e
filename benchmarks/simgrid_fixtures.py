"""What SimGrid says of exchanges on networks, to check `jaxcomm.plan` against.

    python -m benchmarks.simgrid_fixtures [--only=NAME] [--out=tests/plan/simgrid.json]

Needs SimGrid's Python module, Debian's python3-simgrid 3.32, in /usr/bin/python3. One actor for
each device sends and receives in every step at once, waits for both, and goes on: devices do not
wait for each other at the ends of steps, as they do in the simulation.

SimGrid is set to plain max-min sharing: network/model:CM02, network/crosstraffic:0,
network/TCP-gamma:0 (no window), latency-factor and bandwidth-factor 1, weight-S 0. Each direction
of a cable is a link of its own, and routes are those of `Topology.routes`. CM02 weighs streams by
their latencies, so all routes have the same one, half of it at each host's cable.

A step that is repeated, as all of a ring's are, is simulated 64 times instead of 511: SimGrid needs
five minutes for all of them.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.arguments import new_file, one_of

PYTHON = "/usr/bin/python3"
OUT = "tests/plan/simgrid.json"
DEVICES, PER_SWITCH, CABLES = 512, 16, 2
RATE, LATENCY = 100_000, 1e-6  # Mbit/s, seconds for a message
REPEATED = 64  # of a step that is repeated, at most
SETTINGS = [
    "network/model:CM02",
    "network/crosstraffic:0",
    "network/TCP-gamma:0",
    "network/latency-factor:1",
    "network/bandwidth-factor:1",
    "network/weight-S:0",
    "maxmin/precision:1e-9",
    "surf/precision:1e-12",
]
# The network, the algorithm and its arguments, bytes of the vector.
CASES: dict[str, tuple[str, str, list[Any], int]] = {
    "dln, plain, 1 MiB": ("dln", "halving_doubling", [], 2**20),
    "dln, plain": ("dln", "halving_doubling", [], 2**26),
    "dln, far first": ("dln", "halving_doubling", ["far_first"], 2**26),
    "dln, shifted": ("dln", "halving_doubling", ["shifted", PER_SWITCH], 2**26),
    "dln, spread": ("dln", "halving_doubling", ["spread", PER_SWITCH], 2**26),
    "dln_2d, plain": ("dln_2d", "halving_doubling", [], 2**26),
    "dln_2d, shifted": ("dln_2d", "halving_doubling", ["shifted", PER_SWITCH], 2**26),
    "dln_2d, shifted, one dimension after the other": (
        "dln_2d",
        "halving_doubling",
        ["shifted", PER_SWITCH, [4, 8]],
        2**26,
    ),
    "dln_2d, spread": ("dln_2d", "halving_doubling", ["spread", PER_SWITCH, [4, 8]], 2**26),
    "fat_tree, far first": ("fat_tree", "halving_doubling", ["far_first"], 2**26),
    "fat_tree hashed, far first": ("hashed", "halving_doubling", ["far_first"], 2**26),
    "fat_tree, ring": ("fat_tree", "ring", [], 2**26),
    "dln, ring": ("dln", "ring", [], 2**26),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simgrid_fixtures")
    parser.add_argument("--out", type=new_file, default=OUT)
    parser.add_argument(
        "--only", type=one_of(CASES), help="one case; the others stay as they are in the file"
    )
    args = parser.parse_args()
    out = Path(args.out)
    rows = json.loads(out.read_text())["rows"] if out.exists() else {}
    for name in [args.only] if args.only else CASES:
        rows[name] = {**described(name), **simulated(name)}
        print(name, rows[name]["seconds"], flush=True)
        fixture = {
            "command": "python -m benchmarks.simgrid_fixtures",
            "date": datetime.date.today().isoformat(),
            "settings": SETTINGS,
            "rows": rows,
        }
        out.write_text(json.dumps(fixture, indent=1) + "\n")
    return 0


def network(name: str) -> Any:
    """One of the networks of the cases, all of 512 devices."""
    from jaxcomm.plan import fabrics

    if name == "dln":
        return fabrics.dln(name, DEVICES, RATE, PER_SWITCH, 1, CABLES * RATE)
    if name == "dln_2d":
        return fabrics.dln_2d(name, DEVICES, RATE, PER_SWITCH, (4, 8), 1, CABLES * RATE)
    routing = "hashed" if name == "hashed" else "d_mod_k"
    return fabrics.fat_tree(name, DEVICES, RATE, PER_SWITCH, routing=routing)


def algorithm(name: str, arguments: list[Any]) -> Any:
    """An algorithm by its name."""
    from jaxcomm.collectives import algorithms

    given = [tuple(a) if isinstance(a, list) else a for a in arguments]
    return algorithms.BY_NAME[name](*given)


def described(name: str) -> dict[str, Any]:
    """What a row is of."""
    made, chosen, arguments, size = CASES[name]
    return {"network": made, "algorithm": chosen, "arguments": arguments, "bytes": size}


def simulated(name: str) -> dict[str, Any]:
    """Runs SimGrid on the pairs and the routes of a case."""
    from jaxcomm.plan.steps import steps

    made, chosen, arguments, size = CASES[name]
    topology = network(made)
    tasks: list[Any] = []
    routes: dict[str, list[int]] = {}
    for step in steps(algorithm(chosen, arguments), DEVICES):
        messages, links = topology.routes(step.pairs.sources, step.pairs.targets)
        pairs = list(zip(step.pairs.sources.tolist(), step.pairs.targets.tolist(), strict=True))
        for i, (a, b) in enumerate(pairs):
            routes[f"{a} {b}"] = links[messages == i].tolist()
        tasks.append([pairs, round(step.share * size), min(step.times, REPEATED)])
    task = {
        "settings": SETTINGS,
        "hosts": DEVICES,
        "rates": (topology.rates / 8e-6).tolist(),
        "latency": LATENCY,
        "routes": routes,
        "steps": tasks,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(task, file)
        file.flush()
        command = [PYTHON, __file__, "--worker", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"SimGrid failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def work(path: str) -> None:
    """Inside of SimGrid's Python: builds the network, and one actor for each device."""
    import simgrid

    task = json.loads(Path(path).read_text())
    engine = simgrid.Engine([sys.argv[0], *(f"--cfg={s}" for s in task["settings"])])
    zone = simgrid.NetZone.create_full_zone("zone")
    hosts = [zone.create_host(f"h{i}", 1e9) for i in range(task["hosts"])]
    at_hosts = {k for links in task["routes"].values() for k in (links[0], links[-1])}
    links = []
    for i, rate in enumerate(task["rates"]):
        link = zone.create_link(f"link{i}", rate)
        link.set_latency(task["latency"] / 2 if i in at_hosts else 0.0)
        links.append(link.seal())
    for pair, passed in task["routes"].items():
        a, b = (hosts[int(i)].netpoint for i in pair.split())
        route = [simgrid.LinkInRoute(links[k]) for k in passed]
        zone.add_route(a, b, None, None, route, False)
    zone.seal()

    plans: list[list[Any]] = [[] for _ in hosts]
    for pairs, size, times in task["steps"]:
        to, of = dict(pairs), {b: a for a, b in pairs}
        for device, plan in enumerate(plans):
            plan += [(to.get(device), of.get(device), size)] * times

    def device(me: int, plan: list[Any]) -> None:
        for target, source, size in plan:
            sending = None
            if target is not None:
                sending = simgrid.Mailbox.by_name(f"{me} {target}").put_async("data", size)
            if source is not None:
                simgrid.Mailbox.by_name(f"{source} {me}").get()
            if sending is not None:
                sending.wait()

    for i, host in enumerate(hosts):
        simgrid.Actor.create(f"device{i}", host, device, i, plans[i])
    engine.run()
    print(json.dumps({"seconds": simgrid.Engine.clock, "simgrid": simgrid.simgrid_version}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
    else:
        sys.exit(main())
