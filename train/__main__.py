"""Trains a model on all devices of all processes.

One process: `python -m train --config=configs/digits_resnet.py`. Several on this machine:
`python -m train.launch --processes=4 -- --config=...`. Under SLURM or Open MPI 4: the first command
on every node; other MPIs: also --coordinator. On bare machines and Kubernetes: --num_processes and
--process_id too.
Every field of a config is a flag: --config.sync.codec=float32. Files in configs/bases list them.
"""

from train import signals, streams

streams.open_closed()  # Before the pipe of signals.
signals.install()  # Before seconds of imports.

from absl import flags  # noqa: E402

from train import main  # noqa: E402

flags.adopt_module_key_flags(main)  # So that --help shows them.
main.run()
