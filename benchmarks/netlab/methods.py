"""Methods by name, and what is timed of them: an exchange alone, and a whole training step.

A method is a codec or a kind, and may name its algorithm: `bfloat16`, `vote/ring`.
"""

import functools
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.netlab.worker import Case

SIDE = 1024
BARE = "psum"
COMPUTE = "compute"
ROWS = 32  # of a host's batch in a step
STEADY = 64  # steps after which residuals grow no more, and with them the thresholds of Ok-Topk
BATCHES = 8  # that all training programs go round in
SCHEDULED = ("direct", "ring", "two_way_ring", "halving_doubling", "circulant")
# The codec (or kind) and the algorithms of each family; the first is the default.
FAMILIES: dict[str, tuple[str, ...]] = {
    BARE: ("native",),
    "float32": ("native", *SCHEDULED, "hierarchical"),
    "bfloat16": ("default", *SCHEDULED, "hierarchical"),
    "int8": ("default", *SCHEDULED),
    "cnat": ("default", "direct", "ring", "two_way_ring"),
    "int4": ("default", "direct"),
    "scaled_sign": ("default", "direct"),
    "vote": ("default", *SCHEDULED, "hierarchical"),
    "oktopk": ("default",),
    "topk_allgather": ("default",),
    "topk_chunks": ("default",),
    "topk_dsa": ("default",),
    "gtopk": ("default",),
    "gaussiank": ("default",),
    "powersgd1": ("default",),
    "powersgd2": ("default",),
    "powersgd4": ("default",),
}
SPARSE = ("oktopk", "topk_allgather", "topk_chunks", "topk_dsa", "gtopk", "gaussiank")
COMPILED = "NETLAB_COMPILED"  # a folder that the processes of a machine share


def check_method(method: str) -> tuple[str, str]:
    """The family and the algorithm of a method; ValueError for an unknown one."""
    family, _, algorithm = method.partition("/")
    if family not in FAMILIES:
        raise ValueError(f"unknown method {family!r}; there are {', '.join(FAMILIES)}.")
    if algorithm and algorithm not in FAMILIES[family]:
        raise ValueError(f"{family} has {', '.join(FAMILIES[family])}, not {algorithm!r}.")
    return family, algorithm or FAMILIES[family][0]


def transformation(method: str, density: float | None = None) -> Any:
    """The exchange of a method over the axes of `axes_of`; sparse ones have a density."""
    import jaxcomm
    from jaxcomm.plan.families import density_of, hierarchical

    family, algorithm = check_method(method)
    options: dict[str, Any] = {} if algorithm == "default" else {"algorithm": algorithm}
    if algorithm == "hierarchical":
        options["algorithm"] = hierarchical()
    if family == "vote":
        return jaxcomm.majority_vote(axes_of(method), **options)
    if family in SPARSE:
        return jaxcomm.sparse_mean("data", density or density_of(family), family)
    if family.startswith("powersgd"):
        return jaxcomm.low_rank_mean("data", int(family.removeprefix("powersgd")))
    if family in ("int4", "scaled_sign"):
        options["error_feedback"] = True
    return jaxcomm.mean(axes_of(method), family, **options)


def axes_of(method: str) -> str | tuple[str, str]:
    """The mesh axes of a method; hierarchical exchanges go over two."""
    return ("far", "near") if check_method(method)[1] == "hierarchical" else "data"


def shapes_of(params: int) -> dict[str, tuple[int, int]]:
    """The weights of a perceptron of layers of 1024 x 1024, and a smaller last one."""
    shapes = {f"layer{i:02}": (SIDE, SIDE) for i in range(params // SIDE**2)}
    rest = params % SIDE**2 // SIDE or int(not shapes)  # at least one column
    return shapes | ({f"layer{len(shapes):02}": (SIDE, rest)} if rest else {})


def compiled(lowered: Any) -> Any:
    """Compiles a program once on this machine, where the processes share a folder.

    The first process compiles; the others load what it has made, as all run the same program, and
    so do later runs of the same cases in the same order. Programs that would lose their order are
    compiled by all: for them the file is empty.
    """
    import jax
    from jax.experimental import serialize_executable

    from jaxcomm.plan.compiling import keeps_order

    folder = os.environ.get(COMPILED)
    if folder is None:
        return lowered.compile()
    file = Path(folder, f"{_count(folder)}")
    if jax.process_index() == 0 and not file.exists():
        program = lowered.compile()
        scratch = file.with_suffix(".part")
        parts = serialize_executable.serialize(program) if keeps_order(program) else None
        scratch.write_bytes(pickle.dumps(parts) if parts else b"")
        scratch.rename(file)
        return program
    while not file.exists():
        time.sleep(0.01)
    devices = list(jax.sharding.get_mesh().devices.flat)
    if not (packed := file.read_bytes()):
        return lowered.compile()
    parts = pickle.loads(packed)
    return serialize_executable.deserialize_and_load(*parts, execution_devices=devices)


@functools.cache
def _numbers(folder: str) -> list[int]:
    del folder
    return [0]


def _count(folder: str) -> int:
    """1, 2, ...: all processes compile the same programs in the same order."""
    numbers = _numbers(folder)
    numbers[0] += 1
    return numbers[0]


class Exchange(Case):
    """A method's exchange of gradients that are there, compiled, with its state.

    Args:
      method: which.
      shapes: of the gradients.
      density: of sparse methods.
      levels: the devices of both axes of a hierarchical method, (far, near).
    """

    def __init__(
        self,
        method: str,
        shapes: dict[str, tuple[int, int]],
        density: float | None = None,
        levels: tuple[int, int] | None = None,
    ):
        import jax

        import jaxcomm
        from jaxcomm.plan import exchanges

        family, algorithm = check_method(method)
        axes, mesh = axes_of(method), jaxcomm.data_mesh()
        if levels is not None and axes != "data":
            mesh = jax.sharding.Mesh(mesh.devices.reshape(levels), axes)
        jax.set_mesh(mesh)
        start = time.perf_counter()
        tx = bare() if family == BARE else transformation(method, density)
        made = exchanges.Exchange(mesh, axes, tx, list(shapes.values()))
        self.name = method
        self.again = made.run_by(compiled(made.lower()))
        self.row = {"name": method, "method": method, "codec": family, "algorithm": algorithm}
        self.row |= {"compile_s": time.perf_counter() - start}
        jax.set_mesh(jaxcomm.data_mesh())

    def prepare(self) -> None:
        """Makes its gradients."""
        self.again.prepare()

    def run(self) -> None:
        """One exchange."""
        import jax

        jax.block_until_ready(self.again())


def bare() -> Any:
    """XLA's all-reduce and nothing else, as a transformation."""
    import jax
    import optax

    psum = jax.shard_map(
        lambda grads: jax.lax.psum(grads, "data"), in_specs=jax.P("data"), out_specs=jax.P()
    )
    return optax.stateless(lambda grads, params: psum(grads))


class Collective(Case):
    """A function of one vector a device, such as an all-reduce, over all axes of a mesh."""

    def __init__(self, name: str, mesh: Any, f: Callable[[Any], Any], x: Any):
        import jax

        jax.set_mesh(mesh)
        axes = jax.P(mesh.axis_names)
        self.x = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, axes), x)
        self.name = name
        one = jax.shard_map(lambda x: f(x[0])[None], in_specs=axes, out_specs=axes, check_vma=False)
        start = time.perf_counter()
        self.program = compiled(jax.jit(one).lower(self.x))
        self.row = {"name": name, "compile_s": time.perf_counter() - start}

    def result(self) -> Any:
        """This process's result."""
        import numpy as np

        return np.asarray(self.program(self.x).addressable_data(0))[0]

    def run(self) -> None:
        """Once."""
        import jax

        jax.block_until_ready(self.program(self.x))


@functools.cache
def batches_of(rows: int, inputs: int, outputs: int) -> list[Any]:
    """Random batches, so many rows on each host: the same ones for all programs of these sizes."""
    import jax
    import numpy as np

    import jaxcomm

    rng = np.random.default_rng(1 + jax.process_index())
    sizes = {"x": inputs, "y": outputs}
    return [
        jaxcomm.global_batch(
            {k: rng.standard_normal((rows, n), dtype=np.float32) for k, n in sizes.items()}, "data"
        )
        for _ in range(BATCHES)
    ]


class Step(Case):
    """Training steps of a perceptron: forward, backward, exchange, optimizer.

    A run goes on with other batches than the one before, as training does.

    Args:
      name: of the case.
      shapes: of its weights, without biases.
      tx: what makes updates of local gradients.
      rows: of a host's batch.
      steps: of a run.
      warm: the runs that come before those that count.
    """

    def __init__(
        self,
        name: str,
        shapes: dict[str, tuple[int, int]],
        tx: Any,
        rows: int = ROWS,
        steps: int = 1,
        warm: int = 1,
    ):
        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax

        import jaxcomm

        def loss_fn(params: Any, batch: Any) -> jax.Array:
            x = batch["x"]
            for layer in shapes:
                x = jax.nn.relu(x @ params[layer])
            return jnp.mean((x - batch["y"]) ** 2)

        gradient = jaxcomm.value_and_grad(loss_fn, "data")
        rng = np.random.default_rng(0)
        params = {
            layer: (rng.standard_normal(shape) * (2 / shape[0]) ** 0.5).astype(np.float32)
            for layer, shape in shapes.items()
        }
        params = jaxcomm.replicate(params)
        sizes = list(shapes.values())
        self.batches = list(batches_of(rows, sizes[0][0], sizes[-1][1]))
        self.state = (params, tx.init(params))

        def step(state: Any, batch: Any) -> Any:
            params, opt_state = state
            is_local = isinstance(opt_state, jaxcomm.LocalStepsState)
            at = jaxcomm.local_params(opt_state) if is_local else params
            loss, grads = gradient(at, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        start = time.perf_counter()
        self.name, self.steps, self.warm = name, steps, warm
        self.program = compiled(jax.jit(step, donate_argnums=0).lower(self.state, self.batches[0]))
        self.row = {"name": name, "compile_s": time.perf_counter() - start}

    def run(self) -> None:
        """Its steps."""
        import jax

        for _ in range(self.steps):
            self.batches.append(self.batches.pop(0))
            self.state, loss = self.program(self.state, self.batches[0])
            jax.block_until_ready((self.state, loss))


def with_sgd(method: str) -> Any:
    """A method, or COMPUTE for no exchange at all, and SGD after it."""
    import optax

    import jaxcomm

    exchange = jaxcomm.no_exchange("data") if method == COMPUTE else transformation(method)
    return optax.chain(exchange, optax.sgd(1e-3))


def warm_of(method: str) -> int:
    """How many steps of training come before those that are timed."""
    return STEADY if check_method(method)[0] == "oktopk" else 1
