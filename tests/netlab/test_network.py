"""Networks that are really made: what they carry and count, and that nothing is left of them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.netlab import network as networks
from benchmarks.netlab.hosts import HostError, run_everywhere
from benchmarks.netlab.network import Network
from jaxcomm import plan

ROOT = Path(__file__).parents[2]


def can_make_networks() -> bool:
    try:
        with Network(plan.load("star", hosts=1)):
            return True
    except (networks.NetworkError, OSError, subprocess.CalledProcessError) as error:
        print(error)
        return False


pytestmark = [
    pytest.mark.multiprocess,
    # pyroute2 forks, and jax, which other tests have loaded, warns of it. netlab loads no jax.
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def root() -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None or not can_make_networks():
        pytest.skip("networks need root, iproute2 and namespaces")


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(plan.load("clusters", hosts=4, rate=100)) as made:
        yield made


def namespaces() -> str:
    return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def is_running(pid: str) -> bool:
    """Whether a process is there, and more than a status that nobody has asked for yet."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] not in "XZ"
    except FileNotFoundError:
        return False


def prefix_of(pid: int) -> str | None:
    """What the names of a process's network begin with; None before it has a number."""
    for path in networks.OWNERS.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.name.isdigit() and path.read_text().split()[0] == str(pid):
                return f"{networks.PREFIX}{path.name}-"
    return None


def test_a_command_on_every_host(network: Network) -> None:
    """Rates and byte counts of a stream, names of hosts, and a failure with its last lines."""
    from benchmarks.netlab.calibrate import calibrated

    rates = calibrated(network, 1.0)
    assert list(rates) == [("h0", "s0"), ("s0", "s1"), ("s1", "h3")]
    assert all(80 < rate < 105 for rate in rates.values())

    script = "import socket; print(socket.gethostbyname('h2'), socket.gethostbyname('HOST'))"
    script = script.replace("HOST", os.uname().nodename)
    printed = run_everywhere(network, [sys.executable, "-c", script], 30)
    assert [line.split() for line in printed] == [
        [network.address("h2"), network.address(host)] for host in ("h0", "h1", "h2", "h3")
    ]
    usual = os.sched_getscheduler(0)
    script = "import os; print(os.sched_getscheduler(0) == os.SCHED_BATCH)"
    assert run_everywhere(network, [sys.executable, "-c", script], 30) == ["True\n"] * 4
    assert os.sched_getscheduler(0) == usual
    script = "import os, sys, time; os.environ['NETLAB_RANK'] == '2' and sys.exit('no'); "
    start = time.monotonic()
    with pytest.raises(HostError, match=r"of h2 \(rank 2\) ended with status 1:\n  no"):
        run_everywhere(network, [sys.executable, "-c", script + "time.sleep(60)"], 60)
    with pytest.raises(HostError, match=r"of h0 \(rank 0\) did not end in time:\n  here"):
        run_everywhere(network, ["sh", "-c", "echo here; sleep 60"], 0.5)
    assert time.monotonic() - start < 20
    assert network.namespace("s1") in namespaces()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_of_an_ended_run_and_others_are_left_alone(
    network: Network, number: signal.Signals, tmp_path: Path
) -> None:
    command = ["env", "--default-signal=HUP", sys.executable]  # nohup ignores it
    command += ["-m", "benchmarks.netlab", "--topology=star", "--hosts=2"]
    wait = f"echo $$ > {tmp_path}/$NETLAB_RANK; sleep 60"
    ended = subprocess.Popen([*command, "--", "sh", "-c", wait], cwd=ROOT, start_new_session=True)
    while len(pids := "".join(path.read_text() for path in tmp_path.iterdir()).split()) < 2:
        assert ended.poll() is None
        time.sleep(0.05)
    prefix = prefix_of(ended.pid)
    assert prefix is not None and f"{prefix}s0" in namespaces()
    os.kill(ended.pid, number)
    status = ended.wait()
    if number == signal.SIGKILL:
        networks.remove_leftovers()
    else:
        assert status == 128 + number
    left = [prefix in namespaces(), *networks.HOSTS_FILES.glob(f"{prefix}*")]
    is_free = not (networks.OWNERS / prefix.removeprefix(networks.PREFIX).rstrip("-")).exists()
    assert prefix_of(ended.pid) is None
    assert left == [False] or not is_free  # another test's network may have the number by now
    assert network.namespace("h0") in namespaces()
    assert not any(map(is_running, pids))


def test_the_command_line(network: Network) -> None:
    """Real jax processes find each other; a bad flag is one line and status 2."""
    del network  # another one beside it
    command = [sys.executable, "-m", "benchmarks.netlab", "--topology=star", "--hosts=2"]
    script = "import jax; jax.distributed.initialize(); print('rank', jax.process_index(), 'of', "
    script += "jax.process_count())"
    done = subprocess.run(
        [*command, "--rate=200", "--", "python", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2" in done.stdout and "rank 1 of 2" in done.stdout
    assert "h0 to s0 (link 0):" in done.stdout
    wrong = [*command, "--rate=none", "--", "true"]
    done = subprocess.run(wrong, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("netlab: rate=none: a rate is a number")
    assert done.stderr.count("\n") == 1
