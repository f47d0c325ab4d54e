r"""GPU machines on 10 Gb/s Ethernet without RDMA: NCCL's sockets, for one process a machine.

Started on every machine, i = 0 .. 3, the first of them being node0:

    python -m train.launch --cluster=configs/cluster/ethernet_10g.py -- \
        --coordinator=node0:12345 --num_processes=4 --process_id=$i --config=...

One TCP stream fills 10 Gb/s only with a fast core, so NCCL gets several sockets and several threads
to serve them. NCCL allows at most 64 sockets a connection: threads times sockets of a thread.

References:
  NVIDIA, "NCCL user guide: environment variables".
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    config = config_dict.ConfigDict()
    config.processes = 1
    config.env = {
        # Interfaces by the beginning of their names, or exact names after "=". With several, NCCL
        # uses all of them: "=eth0,eth1". A machine's "ip -brief address" lists them.
        "NCCL_SOCKET_IFNAME": "eth,en",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_IB_DISABLE": "1",  # No InfiniBand: do not look for it.
        "NCCL_DEBUG": "WARN",  # "INFO" prints which interfaces it took.
    }
    config.lock()
    return config
