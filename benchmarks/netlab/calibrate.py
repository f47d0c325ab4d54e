"""What a link really carries: one TCP stream through the network, bytes on the wire a second.

On a host, `python -m benchmarks.netlab.calibrate SECONDS` sends from rank 0 to the last rank.
"""

import os
import socket
import sys
import time

from benchmarks.netlab.hosts import run_everywhere
from benchmarks.netlab.network import Network

PORT = 29400
CHUNK = bytes(1 << 18)


def calibrated(network: Network, seconds: float = 2.0) -> dict[tuple[str, str], float]:
    """Mbit/s on the wire of each directed link from the first host to the last."""
    if len(network.topology.hosts) < 2:
        return {}
    first, last = network.topology.hosts[0], network.topology.hosts[-1]
    before = network.bytes_sent()
    command = [sys.executable, "-m", "benchmarks.netlab.calibrate", str(seconds)]
    printed = run_everywhere(network, command, 30 + seconds, {"NETLAB_LAST": network.address(last)})
    elapsed = float(printed[-1])
    after = network.bytes_sent()
    found: dict[tuple[str, str], float] = {}
    for a, b in network.topology.path(first, last):
        sent = sum(after[key] - before[key] for key in after if key[:2] == (a, b))
        found[a, b] = 8 * sent / elapsed / 1e6
    return found


def main(seconds: float) -> None:
    rank, hosts = int(os.environ["NETLAB_RANK"]), int(os.environ["NETLAB_HOSTS"])
    if rank == 0:
        _send(os.environ["NETLAB_LAST"], seconds)
    elif rank == hosts - 1:
        print(_receive())


def _send(address: str, seconds: float) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection((address, PORT), timeout=10)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    with connection:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(CHUNK)


def _receive() -> float:
    """The seconds from the first byte to the last."""
    with socket.create_server(("", PORT)) as server:
        connection, _ = server.accept()
        with connection:
            connection.recv(1)
            start = time.monotonic()
            while connection.recv(1 << 20):
                pass
            return time.monotonic() - start


if __name__ == "__main__":
    main(float(sys.argv[1]))
