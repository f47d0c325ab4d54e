"""What messages and codecs cost in the running job, measured in under a minute."""

import dataclasses
import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomm import _hosts
from jaxcomm import mesh as mesh_
from jaxcomm.collectives import _sending
from jaxcomm.collectives.algorithms.hierarchical import Hierarchical
from jaxcomm.kernels import _device
from jaxcomm.plan.compiling import compiled
from jaxcomm.plan.costs import BY_HOSTS, MERGING, SIZES, Costs, defaults
from jaxcomm.plan.exchanges import Exchange
from jaxcomm.plan.fabrics import star
from jaxcomm.plan.families import FAMILIES, Method
from jaxcomm.plan.loads import Workload
from jaxcomm.plan.machines import Cluster
from jaxcomm.plan.predict import BASELINE
from jaxcomm.plan.sending import sent
from jaxcomm.plan.simulate import Model, Simulation
from jaxcomm.plan.steps import Pairs

ROWS, MATRICES = 1024, 2  # codes are timed on matrices of this many rows, and this many of them
SMALL, LARGE = 1, (2**13, 2**15, 2**17, 2**19)  # float32 values of a message
ENOUGH = 25e-3  # seconds; a message that takes this long need not be larger
CHAINED = 4  # messages in a row, in one program
REPEATS, OFTEN = 7, 35  # short times vary most
ROUNDS = 3  # of repeats, for codes
WARM = 4  # first runs of an exchange, not counted: the heap grows, and its pages are new
_UNLIKELY = (0.2, 1.5)  # shares of a declared rate that messages hardly reach
_TWICE = 1.5  # if both directions take this many times as long as one, they share a rate

# Which methods are timed, and which families they stand for.
TIMED: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("float16",),
    "int8": ("fp8_e4m3",),
    "cnat": (),
    "int4": (),
    "scaled_sign": ("int2",),
    **dict.fromkeys(("vote", "oktopk", "topk_chunks"), ()),
    "topk_allgather": ("topk_dsa", "gtopk", "gaussiank"),
    "powersgd1": (),
    "powersgd4": ("powersgd2",),
}
# Families that often travel through other devices, each of which encodes anew.
ALSO_BY_RING = ("float32", "bfloat16", "int8", "cnat")


def probe(
    mesh: Mesh | None = None,
    cluster: Cluster | None = None,
    families: Sequence[str] | None = None,
) -> Costs:
    """Measures what messages and codecs cost, on all devices of a mesh together.

    Every process calls it. Messages are timed between neighbours in rank, all together, in both
    directions and in one. Codecs are timed in exchanges of two matrices of 1024 x 128 and of 1024 x
    1024 that send only the first number of each message. All processes run these together, so that
    processes that share cores slow each other down and wait for each other, as in training. If an
    operation has several implementations, they are timed too, and `implementation="measure"` then
    uses the fastest.

    Args:
      mesh: a mesh of one axis; None means all devices.
      cluster: the declared network; `efficiency` is then the share of its rates that messages
        reach. Without it, `efficiency` is the default, and `per_byte` is measured on the link to a
        neighbour.
      families: the families whose codecs are timed; None means all.

    Returns:
      The costs; `source` names the machine. `Costs.save` writes them to a file.

    Raises:
      ValueError: for a mesh of several axes, of one device, or of another size than the cluster.

    Wire: what it times: messages of one value and of up to 2 MiB, swaps, all-reduces of one value,
    and the first number of each message of an exchange.
    """
    mesh = mesh_.data_mesh() if mesh is None else mesh
    if len(mesh.axis_names) != 1 or mesh.size == 1:
        raise ValueError(
            f"probe needs a mesh of one axis and several devices, got {dict(mesh.shape)}; run it "
            "in every process of the job, or on simulated devices (python -m jaxcomm.probe "
            "--simulate=4)."
        )
    if cluster is not None and cluster.devices != mesh.size:
        raise ValueError(f"the cluster has {cluster.devices} devices, the mesh {mesh.size}.")
    unknown = set(families or ()) - set(TIMED)
    if unknown:
        raise ValueError(f"unknown family {min(unknown)!r}; there are {', '.join(TIMED)}.")
    # A mesh that is set already may have other devices, and axes of another type.
    mesh = Mesh(mesh.devices, mesh.axis_names)
    with jax.set_mesh(mesh):
        return _measured(mesh, cluster, tuple(TIMED if families is None else families))


def _measured(mesh: Mesh, cluster: Cluster | None, families: tuple[str, ...]) -> Costs:
    """See `probe`."""
    started = time.perf_counter()
    device = "cpu" if mesh.devices.flat[0].platform == "cpu" else "gpu"
    usual, n = defaults(device), mesh.size
    shift = [(r, (r + 1) % n) for r in range(n)]
    one_way = [(r, r + 1) for r in range(0, n - 1, 2)]
    both_ways = one_way + [(b, a) for a, b in one_way]
    # The time of a message varies from second to second, so it is measured at several moments.
    small = functools.partial(_message, mesh, shift if n > 2 else one_way, SMALL, OFTEN)
    latencies = [small()]
    values = _large(mesh, shift, latencies[0])
    large = {
        name: _message(mesh, pairs, values)
        for name, pairs in {"one way": one_way, "both ways": both_ways, "shift": shift}.items()
    }
    between_cpus = _device.is_between_cpu_processes()  # where pairs always take turns
    half_duplex = between_cpus or large["both ways"] > _TWICE * large["one way"]
    all_at_once = large["one way" if n == 2 and half_duplex else "shift"]
    flag = _flag(mesh)
    latencies.append(small())
    per_byte = (all_at_once - latencies[-1]) / (4 * values)
    if per_byte <= 0:
        warnings.warn(
            f"a message of {4 * values:,} bytes took no longer than one of {4 * SMALL}: other work "
            "was done meanwhile. The default cost per byte is used; probe again.",
            UserWarning,
            stacklevel=3,
        )
        per_byte = usual.per_byte
    swap = _swap(mesh, both_ways, latencies[-1]) if between_cpus else 0.0
    local = _locals(mesh, families, Model(latencies[-1], 0.0, half_duplex, swap, per_byte))
    latencies.append(small())
    latency = statistics.median(latencies)
    call = max(flag - 2 * (n - 1) * latency, 0.0)
    efficiency = usual.efficiency
    if cluster is not None:
        pairs = one_way if n == 2 and half_duplex else shift
        declared = _declared(cluster, Pairs(*np.asarray(pairs).T))
        if declared > 0:
            efficiency = _efficiency(declared, per_byte)
            per_byte = min(per_byte, usual.per_byte)
    kind = mesh.devices.flat[0].device_kind
    seconds = time.perf_counter() - started
    return Costs(
        source=f"measured on {n} devices ({kind}) in {seconds:.0f} s",
        latency=latency,
        per_byte=per_byte,
        efficiency=efficiency,
        half_duplex=half_duplex,
        swap=swap,
        stripes=usual.stripes,
        overlap=usual.overlap,
        call=call,
        local=local,
    )


def _methods_of(family: str, mesh: Mesh) -> dict[str, Method]:
    """The exchanges of a family that are timed, by the ends of its names in Costs."""
    known, per_host = FAMILIES[family].algorithms, _per_host(mesh)
    found = {"": Method(family, known[0])}
    if family in ALSO_BY_RING:
        found[MERGING] = Method(family, "ring")
    if 1 < per_host < mesh.size and "hierarchical" in known and family != "float32":
        found[BY_HOSTS] = Method(family, "hierarchical", (("devices_per_host", per_host),))
    return found


def _declared(cluster: Cluster, pairs: Pairs) -> float:
    """Seconds for a byte of each message, at the declared rates."""
    cost = Simulation(cluster.topology, Model(), cluster.order).cost(pairs)
    return float(cost.per_byte.max(initial=0.0))


def _efficiency(declared: float, measured: float) -> float:
    """The share of the declared rates that messages reach, from the seconds of a byte.

    Warns if the rates are unlikely to be those of this network.
    """
    reached = declared / max(measured, 1e-15)
    if not _UNLIKELY[0] <= reached <= _UNLIKELY[1]:
        warnings.warn(
            f"messages reach {reached:.3g} of the rates that the cluster declares; are they in the "
            "right unit, and is every link up at its full rate?",
            stacklevel=4,
        )
    return float(min(reached, 1.0))


def _large(mesh: Mesh, pairs: list[tuple[int, int]], latency: float) -> int:
    """The float32 values of a large message: fewer on a slow network, which would take minutes."""
    for values in LARGE[:-1]:
        if _message(mesh, pairs, values, 1) - latency >= ENOUGH:
            return values
    return LARGE[-1]


def _message(
    mesh: Mesh, pairs: list[tuple[int, int]], values: int, repeats: int = REPEATS
) -> float:
    """Seconds of a message of this many float32 values, all pairs at once."""
    axis = mesh.axis_names[0]

    def several(x: jax.Array) -> jax.Array:
        for _ in range(CHAINED):
            # What a device sends next depends on what has arrived.
            x = jax.lax.ppermute(x, axis, pairs) + x
        return x

    return _slowest(mesh, several, values, repeats) / CHAINED


def _swap(mesh: Mesh, pairs: list[tuple[int, int]], latency: float) -> float:
    """Seconds for a byte of a swap by all pairs at once, beyond its transmission."""

    def several(x: jax.Array) -> jax.Array:
        for _ in range(CHAINED):
            x = _sending.swapped(x, mesh.axis_names[0], pairs)
        return x

    with _sending.first_only():
        seconds = _slowest(mesh, several, LARGE[-1], REPEATS) / CHAINED
    return max(seconds - 2 * latency, 0.0) / (4 * LARGE[-1])


def _flag(mesh: Mesh) -> float:
    """Seconds of XLA's all-reduce of one value."""
    body = functools.partial(jax.lax.psum, axis_name=mesh.axis_names[0])
    return _slowest(mesh, body, SMALL, OFTEN)


def _slowest(
    mesh: Mesh, body: Callable[[jax.Array], jax.Array], values: int, repeats: int
) -> float:
    """The median over repeats of the slowest device's time, for one vector on each device."""
    spec = PartitionSpec(mesh.axis_names[0])
    rows = jax.jit(
        lambda: jnp.ones((mesh.size, values), jnp.float32),
        out_shardings=NamedSharding(mesh, spec),
    )()
    program = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    return _timed(mesh, lambda: program(rows), repeats)


def _locals(mesh: Mesh, families: Sequence[str], messages: Model) -> dict[str, tuple[float, float]]:
    """Seconds of a value, among few and among many; see Costs.local."""
    named = [
        (family, suffix, method)
        for family in families
        for suffix, method in _methods_of(family, mesh).items()
    ]
    asked = [(method, size) for _, _, method in named for size in SIZES]
    seconds = _seconds(mesh, asked, messages)
    return {
        name + suffix: (seconds[method, SIZES[0]], seconds[method, SIZES[1]])
        for family, suffix, method in named
        for name in (family, *TIMED[family])
    }


def _seconds(
    mesh: Mesh, asked: Sequence[tuple[Method, int]], messages: Model
) -> dict[tuple[Method, int], float]:
    """Seconds of a value among this many, on every process at once.

    The programs are exchanges over the whole mesh that send only the first number of each message.
    XLA's own all-reduce cannot be kept from sending. A float32 mean therefore runs on a single
    device, where XLA leaves it out; a low rank has short messages. The time of messages is
    subtracted; the time that processes wait for each other is not.
    """
    made = {key: _exchange(mesh, *key) for key in asked}
    shared = [key for key, each in made.items() if each.mesh == mesh]
    programs = dict(zip(shared, compiled(mesh, [made[key].lower for key in shared]), strict=True))
    gradients: dict[Any, list[jax.Array]] = {}
    runs = {}
    for key, each in made.items():
        program = programs.get(key) or each.lower().compile()
        alike = each.mesh, tuple(each.shapes)
        gradients[alike] = gradients.get(alike) or each.gradients()
        runs[key] = each.run_by(program, gradients[alike])
    times: dict[tuple[Method, int], list[float]] = {key: [] for key in runs}
    for _ in range(ROUNDS):  # speed drifts over seconds, so programs take turns
        for key, run in runs.items():
            repeats = OFTEN if key[1] == SIZES[0] else REPEATS
            times[key] += _times(mesh, run, math.ceil(repeats / ROUNDS), WARM, run.prepare)
    return {
        (method, size): max(
            statistics.median(seconds) - _sending_seconds(method, size, mesh, messages),
            0.0,
        )
        / size
        for (method, size), seconds in times.items()
    }


def _exchange(mesh: Mesh, method: Method, values: int) -> Exchange:
    """What is timed for a method."""
    # Votes have no kernels, so they lack this option.
    options: dict[str, Any] = {} if method.family == "vote" else {"implementation": "measure"}
    if method.is_by_hosts:  # named, as plan.use may prefer another
        between_cpus = _device.is_between_cpu_processes()
        options["algorithm"] = method.made(mesh.size, between_cpus, values)
    tx = method.transformation(mesh.axis_names[0], **options)
    room = _alone(mesh) if method == BASELINE else mesh
    first_only = method.algorithm != "native"
    return Exchange(room, mesh.axis_names[0], tx, _load(values).shapes, first_only)


def _load(values: int) -> Workload:
    """A workload of this many values, as matrices."""
    return Workload(((ROWS, values // (MATRICES * ROWS)),) * MATRICES, step_seconds=1.0)


def _sending_seconds(method: Method, values: int, mesh: Mesh, messages: Model) -> float:
    """Seconds that the messages of a timed exchange take."""
    if method == BASELINE:
        return 0.0
    devices = mesh.size
    per_host = _per_host(mesh)
    parts = sent(method, _load(values), devices, _device.is_between_cpu_processes(), per_host)
    if method.algorithm == "native":
        hops = 2 * (devices - 1)
        per_value = hops / devices * 4 * messages.per_byte
        return sum(p.times * (hops * messages.latency + p.values * per_value) for p in parts)
    free = star("links without limits", devices, "unlimited")
    network = Simulation(free, dataclasses.replace(messages, per_byte=0.0))
    levels = devices // per_host, per_host
    return sum(
        p.times
        * network.exchange(
            p.algorithm,
            p.reduction,
            p.values,
            levels if isinstance(p.algorithm, Hierarchical) else None,
        ).seconds
        for p in parts
    )


def _per_host(mesh: Mesh) -> int:
    """The devices of each host that follow each other."""
    with jax.set_mesh(mesh):
        return _hosts.devices_per_host(mesh.axis_names[0])


def _alone(mesh: Mesh) -> Mesh:
    """This process's first device by itself."""
    device = mesh.local_devices[0]
    return Mesh(np.array([device]), mesh.axis_names)


def _timed(mesh: Mesh, run: Callable[[], Any], repeats: int) -> float:
    """The median over repeats of the slowest process's seconds; all start at once."""
    return statistics.median(_times(mesh, run, repeats))


def _times(
    mesh: Mesh,
    run: Callable[[], Any],
    repeats: int,
    warm: int = 1,
    prepare: Callable[[], None] = lambda: None,
) -> list[float]:
    """Seconds of each repeat, after a few warm-up runs; preparing a run is not timed."""
    for _ in range(warm):
        prepare()
        jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        prepare()
        max_over(mesh, 0.0)
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return [max_over(mesh, seconds) for seconds in times]


def max_over(mesh: Mesh, number: float) -> float:
    """The largest of all processes' numbers; they wait for each other."""
    spec = PartitionSpec(mesh.axis_names[0])
    own = np.full((len(mesh.local_devices),), number, np.float32)
    rows = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), own)
    return float(_largest(mesh)(rows))


@functools.cache
def _largest(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
