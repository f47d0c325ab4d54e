"""What messages and codes cost in this very job, measured in under a minute."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm import codecs
from jaxcomm import mesh as mesh_
from jaxcomm.kernels.reductions import all_finite
from jaxcomm.plan.costs import SIZES, Costs, defaults
from jaxcomm.plan.families import FAMILIES, FEEDBACK, Method
from jaxcomm.plan.machines import Cluster
from jaxcomm.plan.simulate import Model, Simulation
from jaxcomm.plan.steps import Pairs

ROWS, MATRICES = 1024, 2  # what codes are timed on: matrices of so many rows
SMALL, LARGE = 1, (2**13, 2**15, 2**17, 2**19)  # float32 values of a message
ENOUGH = 25e-3  # seconds; a message that takes so long need not be larger
CHAINED = 4  # messages in a row, in one program
REPEATS, OFTEN = 7, 35  # what is small varies most
_TWICE = 1.5  # both directions at once take so much longer than one where they share a rate

# Which methods are timed, and for whom they stand.
TIMED: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("float16",),
    "int8": ("fp8_e4m3",),
    "cnat": (),
    "int4": (),
    "scaled_sign": ("int2",),
    "vote": (),
    "oktopk": (),
    "topk_allgather": ("topk_dsa", "gtopk", "gaussiank"),
    "powersgd1": (),
    "powersgd4": ("powersgd2",),
}


def probe(
    mesh: Mesh | None = None,
    cluster: Cluster | None = None,
    families: Sequence[str] | None = None,
) -> Costs:
    """Measures what messages and codes cost, on all devices of a mesh at once.

    Every process calls it. Messages are timed between neighbours in rank, all at once, both ways
    and one way. Codes are timed on the first device of each process, all at once, so that processes
    that share cores slow each other down as they will in training, on two matrices of 1024 x 128
    and of 1024 x 1024. A device that is alone has no errors to feed back, so the codes of means
    with error feedback are timed by themselves. Where an operation has several implementations,
    they are timed too; `implementation="measure"` finds the choice again.

    Args:
      mesh: of one axis; None is all devices.
      cluster: what the network is declared to be. Then `efficiency` is what messages reach of it.
        Without it, `efficiency` is the default's, and `per_byte` is what a neighbour's link takes.
      families: which methods' codes are timed; None is all of TIMED.

    Returns:
      The costs; `source` says the machine. `Costs.save` writes them.

    Raises:
      ValueError: for a mesh of several axes, one device, or another number than the cluster has.
    """
    mesh = mesh_.data_mesh() if mesh is None else mesh
    if len(mesh.axis_names) != 1 or mesh.size == 1:
        raise ValueError(f"probe needs a mesh of one axis and several devices, got {mesh.shape}.")
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
    # What a message takes varies from second to second, so it is asked at several moments.
    small = functools.partial(_message, mesh, shift if n > 2 else one_way, SMALL, OFTEN)
    latencies = [small()]
    values = _large(mesh, shift, latencies[0])
    large = {
        name: _message(mesh, pairs, values)
        for name, pairs in {"one way": one_way, "both ways": both_ways, "shift": shift}.items()
    }
    half_duplex = large["both ways"] > _TWICE * large["one way"]
    all_at_once = large["one way" if n == 2 and half_duplex else "shift"]
    flag = _flag(mesh)
    latencies.append(small())
    local: dict[str, tuple[float, float]] = {}
    for family in families:
        pair = _local(mesh, family, SIZES[0]), _local(mesh, family, SIZES[1])
        local |= dict.fromkeys((family, *TIMED[family]), pair)
    latencies.append(small())
    latency = statistics.median(latencies)
    call = max(flag - 2 * (n - 1) * latency, 0.0)
    per_byte = max(all_at_once - latency, 0.0) / (4 * values)
    efficiency = usual.efficiency
    if cluster is not None:
        pairs = one_way if n == 2 and half_duplex else shift
        declared = _declared(cluster, Pairs(*np.asarray(pairs).T))
        if declared > 0:
            efficiency = float(min(max(declared / max(per_byte, 1e-15), 0.05), 1.0))
            per_byte = min(per_byte, usual.per_byte)
    kind = mesh.devices.flat[0].device_kind
    seconds = time.perf_counter() - started
    return Costs(
        source=f"measured on {n} devices ({kind}) in {seconds:.0f} s",
        latency=latency,
        per_byte=per_byte,
        efficiency=efficiency,
        half_duplex=half_duplex,
        stripes=usual.stripes,
        overlap=usual.overlap,
        call=call,
        local=local,
    )


def _declared(cluster: Cluster, pairs: Pairs) -> float:
    """Seconds for a byte of each message, at the declared rates."""
    cost = Simulation(cluster.topology, Model(), cluster.order).cost(pairs)
    return float(cost.per_byte.max(initial=0.0))


def _large(mesh: Mesh, pairs: list[tuple[int, int]], latency: float) -> int:
    """The float32 values of a large message: fewer on a slow network, which would take minutes."""
    for values in LARGE[:-1]:
        if _message(mesh, pairs, values, 1) - latency >= ENOUGH:
            return values
    return LARGE[-1]


def _message(
    mesh: Mesh, pairs: list[tuple[int, int]], values: int, repeats: int = REPEATS
) -> float:
    """Seconds of a message of so many float32 values, all pairs at once."""
    axis = mesh.axis_names[0]

    def several(x: jax.Array) -> jax.Array:
        for _ in range(CHAINED):
            # What a device sends next depends on what has arrived.
            x = jax.lax.ppermute(x, axis, pairs) + x
        return x

    return _slowest(mesh, several, values, repeats) / CHAINED


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


def _local(mesh: Mesh, family: str, values: int) -> float:
    """Seconds of a value among so many, on every process at once."""
    about = FAMILIES[family]
    if FEEDBACK in about.needs and about.options["method"] == "mean":
        return _feedback(mesh, family, values) / values
    method = Method(family, about.algorithms[0])
    return _exchange(mesh, _alone(mesh), method, (ROWS, values // (MATRICES * ROWS))) / values


def _alone(mesh: Mesh) -> Mesh:
    """This process's first device by itself."""
    device = mesh.local_devices[0]
    return jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=[device])


def _feedback(mesh: Mesh, family: str, values: int) -> float:
    """Seconds: what a device encodes, decodes, keeps and adds, without messages."""
    codec, n = codecs.from_name(family), values // mesh.size

    def body(x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        finite = all_finite([x])
        blocks = (x + residual).reshape(mesh.size, n)
        payload = codec.encode(blocks)
        left = (blocks - codec.decode(payload, n)).reshape(-1)
        arrived = jax.lax.optimization_barrier(payload)
        mine = codec.decode_and_sum(arrived, n)
        result = jnp.tile(codec.encode(mine)[None], (mesh.size, 1))
        results = codec.decode(jax.lax.optimization_barrier(result), n).reshape(-1)
        return jnp.where(finite, results, jnp.nan), jnp.where(finite, left, residual)

    own = np.random.default_rng(0).standard_normal(n * mesh.size, np.float32)
    x = jax.device_put(own, mesh.local_devices[0])
    program, alone = jax.jit(body), _alone(mesh)

    def run() -> Any:
        with jax.set_mesh(alone):  # the mesh that is set may have devices of other processes
            return program(x, x)

    return _timed(mesh, run)


def _exchange(mesh: Mesh, over: Mesh, method: Method, shape: tuple[int, int]) -> float:
    """Seconds of an exchange of the matrices over a mesh of one axis, all processes at once."""
    with jax.set_mesh(over):
        tx = method.transformation("data", implementation="measure")
        names = [f"w{i}" for i in range(MATRICES)]
        state = jax.jit(tx.init)(mesh_.replicate({w: jnp.zeros(shape, jnp.float32) for w in names}))
        rows = len(over.local_devices)
        values = np.random.default_rng(0).standard_normal((rows, *shape), np.float32)
        sharding = NamedSharding(over, PartitionSpec("data"))
        own = jax.make_array_from_process_local_data(sharding, values)
        grads = {w: jnp.copy(own) for w in names}
        program = jax.jit(tx.update)
        program(grads, state)

    def run() -> Any:
        with jax.set_mesh(over):
            return program(grads, state)

    return _timed(mesh, run)


def _timed(mesh: Mesh, run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The median over repeats of the slowest process's seconds; all start at once."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        max_over(mesh, 0.0)
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(max_over(mesh, seconds) for seconds in times)


def max_over(mesh: Mesh, number: float) -> float:
    """The largest of all processes' numbers; they wait for each other."""
    spec = PartitionSpec(mesh.axis_names[0])
    own = np.full((len(mesh.local_devices),), number, np.float32)
    rows = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), own)
    return float(_largest(mesh)(rows))


@functools.cache
def _largest(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
