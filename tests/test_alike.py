"""What processes must have alike is compared: parameters in `init`, the first rows of a batch."""

import pytest

from processes import run_processes

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
    jax.experimental.multihost_utils.process_allgather = lambda *args: asked.append(args)
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


def test_parameters_that_were_not_placed() -> None:
    finished = run_processes(2, SCRIPT)
    assert [process.stdout.split() for process in finished] == [["0"], ["1"]]


def test_the_rows_of_the_first_batch() -> None:
    for process in run_processes(2, ROWS):
        assert "process 1 has other shapes of rows than process 0" in process.stdout
        assert "give every process as many rows" in process.stdout
