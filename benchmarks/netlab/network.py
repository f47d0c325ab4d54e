"""A topology as network namespaces: made, shaped, counted and removed again.

A node is a namespace with one address; a link is a veth pair, whose both ends are shaped; routes
are static. Shaping was seen to be fair to several streams: HTB with a class for packets of less
than 128 bytes, which are mostly acknowledgements, and a queue of 256 KB for the others, under
cubic. TCP hands packets of up to 64 KB to a veth pair, which would arrive as a whole, where a real
card cuts them into packets of 1,500 bytes. On slow links messages that take turns then wait for
each other, so there a packet is at most a millisecond long, or 1,500 bytes. On faster ones that
would cost CPU time, which a card does not.

Names begin with `jxl` and the number of a file in OWNERS, which names the process that made them.
A process that is asked to end removes its own. What one that was killed has left behind is removed
by the next one, and nothing of one that still runs.
"""

import contextlib
import fcntl
import importlib.util
import itertools
import os
import select
import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # processes on hosts import this module, and most of them need no jax
    from jaxcomm.plan import Topology

OWNERS = Path("/run/jaxcomm-netlab")
HOSTS_FILES = Path("/etc/netns")
# XLA takes processes with the same boot id for one machine, and jax refuses some things only of
# several. What is read from `uuid` is another one every time.
_RANDOM = "/proc/sys/kernel/random"
ON_ITS_OWN = ["sh", "-c", f'mount --bind {_RANDOM}/uuid {_RANDOM}/boot_id && exec "$@"', "sh"]
PREFIX = "jxl"
QUEUE_BYTES = 256 * 1024
SEGMENT_BYTES = 1500
PATIENCE = 5.0  # seconds for a process, and then its namespace, to end
LONGEST_MS, SLOW = 1.0, 100.0  # of a packet, on links of fewer Mbit/s
SMALL = 128  # bytes; shorter packets go first
ENDING = (signal.SIGTERM, signal.SIGHUP)
RATES = (0.1, 10_000.0)  # Mbit/s; beyond them a veth pair is the limit, not its shaping
VARIABLES = {
    "net/ipv6/conf/all/disable_ipv6": "1",  # its own messages would be counted
    "net/ipv4/ip_forward": "1",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/fib_multipath_hash_policy": "1",  # streams, not hosts, share parallel links
}


class NetworkError(Exception):
    """What this machine lacks, in one line."""


class Network:
    """A topology that exists while this is open; `with Network(topology) as network`.

    Attributes:
      topology: what it was made from.
    """

    def __init__(self, topology: "Topology"):
        for link in topology.links:
            if link.rate is not None and not RATES[0] <= link.rate <= RATES[1]:
                raise NetworkError(
                    f"the link {link.ends[0]}-{link.ends[1]} has {link.rate:g} Mbit/s; "
                    f"rates are {RATES[0]:g} to {RATES[1]:g}, or unlimited."
                )
        self.topology = topology
        self._nodes = (*topology.hosts, *topology.switches)
        self._owner = OWNERS
        self._prefix = ""
        self._signals = _Ending()

    def __enter__(self) -> "Network":
        _require_root_and_tools()
        # pyroute2 forks, of which jax warns where it is loaded; it has started nothing yet.
        warnings.filterwarnings("ignore", r"os\.fork", RuntimeWarning)
        remove_leftovers()
        self._owner = _take_number()
        self._prefix = f"{PREFIX}{self._owner.name}-"
        try:
            self._signals.raise_exit()
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process in the network and removes it."""
        self._signals.ignore()
        try:
            _remove(self._prefix)
            self._owner.unlink(missing_ok=True)
        finally:
            self._signals.as_before()

    def namespace(self, node: str) -> str:
        """The namespace of a node."""
        return self._prefix + node

    def address(self, node: str) -> str:
        """The IPv4 address of a node."""
        number = self._nodes.index(node)
        return f"10.213.{number // 250}.{number % 250 + 1}"

    def command(self, host: str, command: list[str]) -> list[str]:
        """What runs a command on a host, which sees its own hosts file, and is a machine to XLA."""
        return ["ip", "netns", "exec", self.namespace(host), *ON_ITS_OWN, *command]

    def bytes_sent(self) -> dict[tuple[str, str, int], int]:
        """The bytes that left each end of each link: (from, to, number of the link)."""
        found = {}
        for node in self._nodes:
            with _namespace(self.namespace(node)) as inside:
                for name, sent in _sent_by(inside):
                    i = int(name.removeprefix("link"))
                    a, b = self.topology.links[i].ends
                    found[(node, b if node == a else a, i)] = sent
        return found

    def _make(self) -> None:
        from pyroute2 import netns

        for node in self._nodes:
            netns.create(self.namespace(node))
            self._write_hosts_file(node)
        for i, link in enumerate(self.topology.links):
            a, b = map(self.namespace, link.ends)
            with _namespace(a) as inside:
                peer = {"ifname": f"link{i}", "net_ns_fd": b}
                inside.link("add", ifname=f"link{i}", kind="veth", peer=peer)
        hops = {target: self.topology.next_hops(target) for target in self._nodes}
        for node in self._nodes:
            self._configure(node, hops)

    def _write_hosts_file(self, node: str) -> None:
        """Gloo binds the address that the machine's own name resolves to."""
        folder = HOSTS_FILES / self.namespace(node)
        folder.mkdir(parents=True, exist_ok=True)  # what a reboot left has no owner
        own = os.uname().nodename
        lines = ["127.0.0.1 localhost", f"{self.address(node)} {own}"]
        lines += [f"{self.address(other)} {other}" for other in self._nodes]
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    def _configure(self, node: str, hops: Mapping[str, Mapping[str, str]]) -> None:
        """The address, shaping and routes of a node."""
        _set_variables(self.namespace(node), VARIABLES)
        with _namespace(self.namespace(node)) as inside:
            loopback = inside.link_lookup(ifname="lo")[0]
            inside.link("set", index=loopback, state="up")
            inside.addr("add", index=loopback, address=self.address(node), prefixlen=32)
            index: dict[str, list[int]] = {}
            for i, link in enumerate(self.topology.links):
                if node in link.ends:
                    a, b = link.ends
                    found = inside.link_lookup(ifname=f"link{i}")[0]
                    inside.link("set", index=found, state="up")
                    _shape(inside, found, link.rate)
                    index.setdefault(b if node == a else a, []).append(found)
            for target in self._nodes:
                if target != node:
                    hop = hops[target][node]
                    self._route(inside, target, hop, index[hop])

    def _route(self, inside: Any, target: str, hop: str, links: list[int]) -> None:
        ways = [{"gateway": self.address(hop), "oif": i, "flags": ["onlink"]} for i in links]
        inside.route(
            "add",
            dst=f"{self.address(target)}/32",
            metrics={"cc_algo": "cubic"},
            **(ways[0] if len(ways) == 1 else {"multipath": ways}),
        )


def remove_leftovers() -> None:
    """Removes the networks whose owners are gone."""
    OWNERS.mkdir(parents=True, exist_ok=True)
    # One process at a time: a slower one would remove a new network that took the number.
    with (OWNERS / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in OWNERS.iterdir():
            if path.name.isdigit() and not _is_running(path):
                _remove(f"{PREFIX}{path.name}-")
                path.unlink(missing_ok=True)


def _is_running(path: Path) -> bool:
    """Whether the process that a file names still runs, and is not another one of that number."""
    with contextlib.suppress(FileNotFoundError):
        pid, started = path.read_text().split()
        return _start_of(int(pid)) == started
    return True  # the file is gone, and so is what it stood for


def _start_of(pid: int) -> str | None:
    """When a process was started, as the kernel counts; None if there is no such process."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # The name of the program, in parentheses, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


def _require_root_and_tools() -> None:
    if os.geteuid() != 0:
        raise NetworkError("making networks needs root: run it with sudo, or in a container.")
    if shutil.which("ip") is None:
        raise NetworkError("making networks needs `ip`: install iproute2.")
    if importlib.util.find_spec("pyroute2") is None:
        raise NetworkError('making networks needs pyroute2: pip install -e ".[netlab]".')
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    if "cubic" not in available:
        raise NetworkError(f"this kernel has no TCP cubic, only {', '.join(available)}.")


class _Ending:
    """What signals that ask this process to end do; by default they end it with nothing removed.

    Those that the process ignores or handles are left to it, and all are outside its main thread.
    """

    def __init__(self) -> None:
        self._numbers: list[signal.Signals] = []

    def raise_exit(self) -> None:
        """They raise SystemExit with the status that a shell gives to the signal."""
        maker = os.getpid()

        def leave(number: int, frame: object) -> None:
            del frame
            if os.getpid() == maker:
                raise SystemExit(128 + number)
            os._exit(128 + number)  # a process that pyroute2 has forked

        if threading.current_thread() is threading.main_thread():
            self._numbers = [n for n in ENDING if signal.getsignal(n) is signal.SIG_DFL]
        for number in self._numbers:
            signal.signal(number, leave)

    def ignore(self) -> None:
        """They do nothing, until `as_before`."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def as_before(self) -> None:
        """They end the process at once."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_DFL)


def _take_number() -> Path:
    """A file with a number that no other network has; it names this process."""
    own = OWNERS / f".{os.getpid()}"
    own.write_text(f"{os.getpid()} {_start_of(os.getpid())}")
    for number in itertools.count():
        path = OWNERS / str(number)
        with contextlib.suppress(FileExistsError):
            os.link(own, path)  # made with its content, or not at all
            break
    own.unlink()
    return path


def _remove(prefix: str) -> None:
    """Ends the processes of all namespaces with a prefix, and removes these."""
    from pyroute2 import netns

    names = [name for name in netns.listnetns() if name.startswith(prefix)]
    for name in names:
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        for pid in done.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                _end(int(pid))
    for name in names:
        _remove_one(name)
    for folder in HOSTS_FILES.glob(f"{prefix}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _end(pid: int) -> None:
    """Kills a process, and waits until it has ended: it takes a moment."""
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        select.select([handle], [], [], PATIENCE)
    finally:
        os.close(handle)


def _remove_one(name: str) -> None:
    """A namespace may be busy for a moment after its last process was ended."""
    from pyroute2 import netns

    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return netns.remove(name)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[Any]:
    """pyroute2's handle on the links and routes of a namespace."""
    from pyroute2 import NetlinkError, NetNS

    inside = NetNS(name)
    try:
        yield inside
    except NetlinkError as error:
        raise NetworkError(f"the kernel refused to set up {name}: {error}.") from None
    finally:
        inside.close()


def _set_variables(namespace: str, variables: Mapping[str, str]) -> None:
    script = "; ".join(f"echo {value} > /proc/sys/{name}" for name, value in variables.items())
    subprocess.run(["ip", "netns", "exec", namespace, "sh", "-c", script], check=True)


def _shape(inside: Any, index: int, mbit: float | None) -> None:
    """Lets small packets go first, and the others wait in a short queue."""
    if mbit is None:
        return
    from pyroute2.netlink.rtnl.tcmsg import plugins

    plugins.setdefault("bfifo", plugins["pfifo"])  # pyroute2 lacks it; its settings are the same
    if mbit < SLOW:
        segments = max(1, int(1000 * mbit * LONGEST_MS / (8 * SEGMENT_BYTES)))
        inside.link("set", index=index, gso_max_segs=segments)
    rate = f"{mbit * 1000:.0f}kbit"
    inside.tc("add", "htb", index, 0x10000, default=0x20)
    inside.tc("add-class", "htb", index, 0x10001, parent=0x10000, rate=rate, ceil=rate)
    for handle, prio, share in ((0x10010, 0, 0.05), (0x10020, 1, 0.95)):
        inside.tc(
            "add-class",
            "htb",
            index,
            handle,
            parent=0x10001,
            rate=f"{mbit * 1000 * share:.0f}kbit",
            ceil=rate,
            prio=prio,
        )
    inside.tc("add", "bfifo", index, 0x200000, parent=0x10020, limit=QUEUE_BYTES)
    # The length of an IPv4 packet is the low half of its first word.
    length = f"0x00000000/0x{0xFFFF & ~(SMALL - 1):08x}+0"
    inside.tc(
        "add-filter",
        "u32",
        index,
        parent=0x10000,
        prio=1,
        protocol=0x0800,
        target=0x10010,
        keys=[length],
    )


def _sent_by(inside: Any) -> Iterator[tuple[str, int]]:
    for found in inside.get_links():
        if found.get_attr("IFLA_IFNAME").startswith("link"):
            yield found.get_attr("IFLA_IFNAME"), found.get_attr("IFLA_STATS64")["tx_bytes"]
