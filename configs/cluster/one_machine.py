r"""Several processes on one machine without accelerators, joined over its loopback interface.

    python -m train.launch --cluster=configs/cluster/one_machine.py -- \
        --config=configs/digits_resnet.py

`{process_id}` in a value becomes the number of the process.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    """Processes on this machine, and their environment variables."""
    config = config_dict.ConfigDict()
    config.processes = 4
    config.env = {
        "JAX_PLATFORMS": "cpu",
        # Numpy's and scikit-learn's own threads would take the cores from the devices.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    config.lock()
    return config
