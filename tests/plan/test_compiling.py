"""Programs that one process compiles and the others load."""

from pathlib import Path

import pytest

from processes import COMPILED_ANEW, run_processes

PROGRAMS = """
    import jax.numpy as jnp, numpy as np
    import jaxcomm
    from jaxcomm.plan import compiling
    from jaxcomm.plan.exchanges import Exchange

    mesh, traced = jaxcomm.data_mesh(), []
    int8, bfloat16 = (jaxcomm.mean("data", codec) for codec in ("int8", "bfloat16"))
    rarely = jaxcomm.multi_steps(bfloat16, 2)  # in a conditional
    asked = [
        Exchange(mesh, "data", tx, [(40, 30)], first_only)
        for tx, first_only in ((int8, False), (bfloat16, False), (int8, True), (rarely, False))
    ]

    def lower(each):
        traced.append(asked.index(each))
        return each.lower()

    programs = compiling.compiled(mesh, [lambda each=each: lower(each) for each in asked])
    print(traced)
    for each, program in zip(asked, programs):
        (updates,), _ = each.run_by(program)()
        print(float(jnp.sum(updates)))
"""


@pytest.mark.multiprocess
def test_every_process_compiles_a_share() -> None:
    """And the programs of others do what its own would."""
    runs = run_processes(2, PROGRAMS, env=COMPILED_ANEW)
    lines = [run.stdout.splitlines()[-5:] for run in runs]
    assert [own[0] for own in lines] == ["[0, 2, 3]", "[1, 3]"], "all compile the last"
    first, second = ([float(number) for number in own[1:]] for own in lines)
    assert first[:2] == second[:2]  # means, equal everywhere
    assert first[2] != second[2]  # this one is of a process's own gradients


@pytest.mark.multiprocess
def test_programs_of_a_folder_are_not_sent(tmp_path: Path) -> None:
    """What jax has loaded from its folder cannot be sent: every process compiles all."""
    env = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    for _ in range(2):  # the second time from the folder
        runs = run_processes(2, PROGRAMS.replace(", (rarely, False)", ""), env=env)
        assert all(run.stdout.splitlines()[-4] == "[0, 1, 2]" for run in runs)
