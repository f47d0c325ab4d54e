"""What processes must have alike is compared: parameters, the first rows, settings."""

import pytest

from processes import free_port, run_processes

pytestmark = pytest.mark.multiprocess

SCRIPT = """
    import jax.numpy as jnp
    import numpy as np
    import jaxcomm

    rank = jax.process_index()

    def refused(f, *words):
        try:
            f()
        except ValueError as error:
            assert all(word in str(error) for word in words), str(error)
            return
        raise AssertionError(f"not refused: {words}")

    jax.set_mesh(jaxcomm.data_mesh())
    tx = jaxcomm.mean("data", "bfloat16")
    own = jax.random.normal(jax.random.key(rank), (3,))  # typed as equal everywhere
    refused(lambda: tx.init({"w": own}), "process 1 has other values of w than process 0")
    refused(lambda: tx.init({"w": np.full(3, rank, np.float32)}), "other values of w")
    tx.init({"w": np.ones(3, np.float32)})

    params = jaxcomm.replicate({"w": jnp.ones(3)})
    asked = []
    jaxcomm._placing._require_equal = lambda *args: asked.append(args)
    tx.init(params)
    tx.init({"w": params["w"]})
    assert not asked, "what was compared is compared again"
    print(rank)
"""

ROWS = """
    import numpy as np
    import jaxcomm

    jax.set_mesh(jaxcomm.data_mesh())
    rows = np.ones((2 + 2 * jax.process_index(), 3), np.float32)
    try:
        jaxcomm.global_batch(rows, "data")
    except ValueError as error:
        print(error)
    batch = jaxcomm.global_batch(np.ones((2, 3), np.float32), "data")  # later ones are not compared
    assert batch.shape == (4, 3)
"""


SETTINGS = """
    import functools
    import jax.numpy as jnp
    import numpy as np
    import optax
    import jaxcomm
    from jaxcomm import plan

    jax.config.update("jax_enable_compilation_cache", False)
    rank = jax.process_index()
    jax.set_mesh(jaxcomm.data_mesh())
    params = jaxcomm.replicate({"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))})
    rows = np.ones((2, 3), np.float32)

    def is_in(names, path, shape):
        return path in names

    def planned():
        plan.use(plan.cluster(plan.fabrics.star("room", hosts=2, rate=100 + rank)))
        return jaxcomm.mean("data", "int8")

    made = {
        "order": lambda: jaxcomm.mean("data", "int8", bucket_order=["b", "a"][:: 1 - 2 * rank]),
        "codec": lambda: jaxcomm.mean("data", ["bfloat16", "float16"][rank]),
        "every": lambda: jaxcomm.multi_steps(jaxcomm.mean("data"), 2 + rank),
        "density": lambda: jaxcomm.sparse_mean("data", [0.1, 0.2][rank]),
        "rule": lambda: jaxcomm.majority_vote("data", ties=["positive", "random"][rank]),
        "steps": lambda: jaxcomm.dense_first(jaxcomm.mean("data", "int8"), 3 + rank),
        "rate": lambda: jaxcomm.factored_adam(jaxcomm.mean("data"), [0.01, 0.02][rank]),
        "labels": lambda: optax.partition(
            {"sent": jaxcomm.mean("data"), "frozen": jaxcomm.set_to_zero("data")},
            dict(zip("ab", ["sent", "frozen"][:: 1 - 2 * rank])),
        ),
        "exempt": lambda: jaxcomm.mean("data", "int8", exempt=lambda path, _: path == "ab"[rank]),
        "stack": lambda: jaxcomm.with_layer_axis(jaxcomm.mean("data", "int8"), ["a", "b"][rank:]),
        "plan": planned,
        "objects": lambda: jaxcomm.factored_adam(
            jaxcomm.mean("data", exempt=functools.partial(is_in, {"a", "c", "d", "e"})),
            lambda step: 1e-3 / (1 + step),
        ),
        "alike": lambda: optax.chain(
            jaxcomm.local("data", optax.trace(0.9)),
            jaxcomm.mean("data", "cnat", exempt=lambda path, shape: path == "b"),
        ),
        "adam": lambda: jaxcomm.one_bit_adam("data", lambda step: 1e-3, dense_steps=2),
        "low rank": lambda: jaxcomm.low_rank_mean("data", 1),
        "a set": lambda: jaxcomm.mean("data", "int8", exempt={"a", "b", "*", "?"}),
        "local steps": lambda: jaxcomm.local_steps(
            optax.adam(1e-3), 4, optax.sgd(0.7), jaxcomm.mean("data", "int4", error_feedback=True)
        ),
    }
    if {first}:
        jaxcomm.global_batch(rows, "data")
    for name in {names}:
        try:
            tx = made[name]()
            jaxcomm.explain(tx, params) if rank else None  # in a trace nothing is noted
            tx.init(params)
            jaxcomm.global_batch(rows, "data")
            print("alike")
        except ValueError as error:
            print(error)
        plan.use(None)
"""


@pytest.mark.parametrize("first", [False, True])
def test_settings_of_exchanges(first: bool) -> None:
    """Also where a batch was placed, and compared, before the exchange was made."""
    names = ["order", "codec", "every", "density", "rule", "steps"]
    names += ["rate", "labels", "exempt", "stack", "plan"]
    script = SETTINGS.replace("{names}", repr(names)).replace("{first}", repr(first))
    for process in run_processes(2, script):
        lines = process.stdout.splitlines()
        assert len(lines) == len(names)
        for line in lines:
            assert "process 1 has other settings of exchanges than process 0" in line
            assert "run the same program" in line
        assert "([0.01, " in lines[6] and "([0.02, " in lines[6]  # what differs is shown


VERSIONS = """
    import jax.numpy as jnp
    import jaxcomm

    rank = jax.process_index()
    jax.set_mesh(jaxcomm.data_mesh())
    if {how} == "option":
        jax.config.update("jax_threefry_partitionable", rank == 0)
    elif {how} == "version":
        jaxcomm._compat.__version__ = f"0.{rank}"
    tx = jaxcomm.mean("data", "cnat")
    try:
        tx.init({"w": jnp.ones((8, 8))})
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize("how", ["option", "version"])
def test_versions_and_options_of_jax(how: str) -> None:
    """With other keys, or of another version, a process would misread what others send."""
    differ = {"option": "jax_threefry_partitionable=False", "version": "jaxcomm 0.1, jax "}[how]
    for process in run_processes(2, VERSIONS.replace("{how}", repr(how))):
        assert "process 1 has other settings of exchanges than process 0" in process.stdout
        assert differ in process.stdout


ALONE = """
    import threading
    import jax.numpy as jnp
    import numpy as np
    import jaxcomm
    from jaxcomm import plan

    jax.config.update("jax_enable_compilation_cache", False)
    rank = jax.process_index()
    mesh = jaxcomm.data_mesh()
    jax.set_mesh(mesh)
    params = jaxcomm.replicate({"a": jnp.ones((4, 4))})
    made = [jaxcomm.mean("data", "int8"), jaxcomm.mean("data", "int4")]
    if rank:  # a report
        plan.use(plan.cluster(plan.fabrics.star("room", hosts=2, rate=100)))
        plan.use(None)
    made[0].init(params)
    if rank:
        made[0].init(params)  # once more, in one process
    failed = []

    def init(tx):
        try:
            with jax.set_mesh(mesh):
                tx.init(params)
        except ValueError as error:
            failed.append(error)

    for tx in made[:: 1 - 2 * rank]:
        thread = threading.Thread(target=init, args=(tx,))
        thread.start()
        thread.join()
    made[1].init(params)
    jaxcomm.global_batch(np.ones((2, 3), np.float32), "data")
    print(len(failed))
"""


def test_what_one_process_may_do_alone() -> None:
    finished = run_processes(2, ALONE)
    assert [process.stdout.split() for process in finished] == [["0"], ["0"]]


def test_settings_that_are_alike_are_not_refused() -> None:
    names = [
        "alike",
        "adam",
        "low rank",
        "a set",
        "local steps",
        "objects",
    ]  # sets have other orders
    script = SETTINGS.replace("{names}", repr(names)).replace("{first}", "False")
    for process in run_processes(2, script):
        assert process.stdout.split() == ["alike"] * len(names)


def test_parameters_that_were_not_placed() -> None:
    finished = run_processes(2, SCRIPT)
    assert [process.stdout.split() for process in finished] == [["0"], ["1"]]


UNEQUAL = """
    import os
    rank = int(os.environ["RANK"])
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={1 + rank}"
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import jaxcomm

    jax.distributed.initialize("127.0.0.1:PORT", 2, rank, cluster_detection_method="deactivate")
    x = np.random.default_rng(0).standard_normal((12, 8), np.float32)
    y = x.sum(1, keepdims=True)
    own = slice(4 * rank, 4 * rank + 4 * (1 + rank))
    jax.set_mesh(jaxcomm.data_mesh())

    @jax.jit
    def step(p, s, b):
        def loss(p, b):
            return jnp.mean((b[0] @ p - b[1]) ** 2)

        _, grads = jaxcomm.value_and_grad(loss, "data")(p, b)
        updates, s = tx.update(grads, s, p)
        return optax.apply_updates(p, updates), s

    tx = optax.chain(jaxcomm.mean("data"), optax.sgd(0.1))
    p = jaxcomm.replicate(np.zeros((8, 1), np.float32))
    s, expected = tx.init(p), np.zeros((8, 1), np.float32)
    for _ in range(3):
        p, s = step(p, s, jaxcomm.global_batch((x[own], y[own]), "data"))
        expected -= 0.1 * 2 / 12 * x.T @ (x @ expected - y)
    np.testing.assert_allclose(np.asarray(p.addressable_data(0)), expected, atol=1e-5)
    print(len(jax.local_devices()))
"""


def test_processes_with_other_numbers_of_devices() -> None:
    script = UNEQUAL.replace("PORT", str(free_port()))
    finished = run_processes(2, script, join=False)
    assert [process.stdout.split() for process in finished] == [["1"], ["2"]]


def test_the_rows_of_the_first_batch() -> None:
    for process in run_processes(2, ROWS):
        assert "process 1 has other shapes of rows than process 0" in process.stdout
        assert "give every process as many rows for each" in process.stdout


KINDS = """
    import numpy as np
    import jaxcomm

    jax.set_mesh(jaxcomm.data_mesh())
    rank = jax.process_index()
    for rows in (np.ones((2, 3 + rank), np.float32), np.ones((2, 3), ["f4", "i4"][rank])):
        try:
            jaxcomm.global_batch(rows, "data")
        except ValueError as error:
            print("other shapes of rows" in str(error))
        jaxcomm.mesh._ASKED.clear()
    for tree in (
        {"w": np.full(3, rank, np.float32)},
        {"k": jax.random.key(rank)},
        {"ab"[rank]: np.ones(3, np.float32)},
    ):
        try:
            jaxcomm.replicate(tree)
        except ValueError as error:
            print(*str(error).split()[3:8])
"""


def test_each_kind_of_difference_is_noticed() -> None:
    for process in run_processes(2, KINDS):
        assert process.stdout.splitlines() == [
            "True",
            "True",
            "other values of w than",
            "other values of k than",
            "other names, shapes or dtypes",
        ]


APART = """
    import threading

    import jax.numpy as jnp
    import numpy as np
    import jaxcomm

    if jax.process_index():
        with jax.set_mesh(jaxcomm.data_mesh(devices=jax.local_devices())):
            jaxcomm.mean("data").init(jaxcomm.replicate({"w": jnp.ones(3)}))

        def place():
            with jax.set_mesh(jaxcomm.data_mesh()):
                jaxcomm.global_batch(np.ones((2, 3), np.float32), "data")
            print("placed")

        thread = threading.Thread(target=place)
        thread.start()
        thread.join()
    print("done")
"""


def test_a_mesh_of_one_process_and_a_thread_wait_for_no_other_process() -> None:
    finished = run_processes(2, APART, timeout=60)
    assert [process.stdout.split() for process in finished] == [["done"], ["placed", "done"]]
