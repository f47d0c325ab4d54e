"""Exchanges in conditionals and loops, where XLA on CPU would lose their order among the others."""

from pathlib import Path

import pytest

from processes import run_processes

STEPS = """
    import jax.numpy as jnp, numpy as np
    import jaxcomm

    jax.set_mesh(jaxcomm.data_mesh())
    PARAMS = {"layers": jnp.ones((2, 4, 4))}
    BATCH = jaxcomm.global_batch(np.ones((1, 4)), "data")

    def loss_fn(params, batch, layer=lambda x: x):
        body = lambda x, layers: (x @ layer(layers["layers"]), None)
        return jnp.mean(jax.lax.scan(body, batch, params)[0])

    def step(tx, params, layer=lambda x: x, at=lambda params, state: params):
        state = tx.init(params)
        grad = jaxcomm.value_and_grad(lambda p, x: loss_fn(p, x, layer), "data")
        update = jax.jit(lambda p, s, x: tx.update(grad(at(p, s), x)[1], s, p))
        try:
            update.lower(params, state, BATCH)
        except ValueError as error:
            print("refused:", str(error).partition(" exchanges in ")[0])
        else:
            print("traced")

    mean = jaxcomm.mean("data")
    step(mean, PARAMS)
    step(jaxcomm.multi_steps(mean, 2), PARAMS)
    backward = jaxcomm.in_backward(mean, ["layers"])
    step(backward, PARAMS, jaxcomm.exchanged, backward.attach)
    split = jaxcomm.shard(PARAMS, "data", layers=["layers"])
    step(jaxcomm.sharded(mean), split, jaxcomm.gather, jaxcomm.sharded_params)
"""


@pytest.mark.multiprocess
def test_programs_of_a_folder_are_refused(tmp_path: Path) -> None:
    """A program that is read from there has lost its order; others keep theirs."""
    for enabled, refused in (("true", True), ("false", False)):
        env = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": enabled}
        names = ("the optimizer", "jaxcomm.exchanged", "jaxcomm.gather")
        rest = [f"refused: {name}" if refused else "traced" for name in names]
        for run in run_processes(2, STEPS, env=env):
            assert run.stdout.splitlines()[-4:] == ["traced", *rest]


@pytest.mark.multiprocess
def test_devices_of_one_process_are_refused_them_too(tmp_path: Path) -> None:
    """They would mix up two collectives that run at once, and crash; one device has none."""
    for devices, expected in ((2, "refused: the optimizer"), (1, "traced")):
        env = {
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        batch = STEPS.replace("np.ones((1, 4))", f"np.ones(({devices}, 4))")
        [run] = run_processes(1, batch, env=env)
        assert run.stdout.splitlines()[:2] == ["traced", expected]
