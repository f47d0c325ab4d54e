"""The helper that every test with real processes stands on."""

import time
from pathlib import Path

import pytest

from processes import ProcessError, run_processes

pytestmark = pytest.mark.multiprocess


@pytest.mark.newest
def test_two_processes_add_up_what_they_hold() -> None:
    finished = run_processes(
        2,
        """
        import os
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P

        rank = jax.process_index()
        assert rank == int(os.environ["RANK"]) and jax.local_device_count() == 1
        mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))
        local = np.full((1, 3), 10.0 ** rank, np.float32)
        x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), local)
        add = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"),
                            out_specs=P())
        print(rank, os.getpid(), *np.asarray(jax.jit(add)(x)[0]))
        """,
    )
    words = [result.stdout.split() for result in finished]
    assert [line[0] for line in words] == ["0", "1"]
    assert words[0][1] != words[1][1], "one process played both ranks"
    assert all(line[2:] == ["11.0"] * 3 for line in words)


def test_a_failure_names_the_rank_and_ends_the_others() -> None:
    script = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            print("about to fail")
            sys.exit("no such thing")
        time.sleep(600)
        """
    start = time.monotonic()
    with pytest.raises(ProcessError, match=r"(?s)rank 1 exited with 1.*to fail.*no such thing"):
        run_processes(3, script, join=False)
    assert time.monotonic() - start < 60


def test_a_process_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    beat = """
import os, time
while True:
    open(os.environ["HEARTBEAT"], "a").write("x")
    time.sleep(0.05)
"""
    script = f"""
        import subprocess, sys
        print("waiting", flush=True)
        subprocess.run([sys.executable, "-c", {beat!r}])
        """
    heartbeat = tmp_path / "heartbeat"
    with pytest.raises(ProcessError, match=r"(?s)ranks \[0\] did not end in 2 seconds.*waiting"):
        run_processes(1, script, timeout=2, join=False, env={"HEARTBEAT": str(heartbeat)})
    beats = heartbeat.stat().st_size
    time.sleep(0.3)
    assert beats > 0
    assert heartbeat.stat().st_size == beats


def test_every_rank_has_its_own_output_and_environment() -> None:
    script = """
        import os, sys
        print(os.environ["WORLD_SIZE"], os.environ["EXTRA"])
        print("rank", os.environ["RANK"], file=sys.stderr)
        """
    finished = run_processes(2, script, join=False, env={"EXTRA": "more"})
    assert [result.stdout for result in finished] == ["2 more\n"] * 2
    assert [result.stderr for result in finished] == ["rank 0\n", "rank 1\n"]


def test_what_libraries_write_themselves_is_not_output() -> None:
    script = """
        import os
        os.write(1, b"[Gloo] Rank ")
        print("ours")
        os.write(1, b"1 is connected\\n")
        """
    [finished] = run_processes(1, script, join=False)
    assert finished == ("ours\n", "[Gloo] Rank 1 is connected\n")
