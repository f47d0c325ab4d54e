r"""VGG-16 for CIFAR-10; the largest gradients travel, by Ok-Topk.

Four processes on this machine; the data set is in TFDS_DATA_DIR, prepared as array_record:

    python -m train.launch --processes=4 -- --config=configs/cifar_vgg.py

It has 14,728,266 parameters and runs for 90 epochs. That needs a GPU, and was not measured. A
smaller run takes minutes on 2 CPU cores: an eighth of the width (0.23 M parameters) and a fifth of
the images:

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m train \
      --config=configs/cifar_vgg.py --config.model.width=0.125 --config.steps=2000 \
      --config.data.train_split='train[:10000]' --config.eval_every=1000

On four devices that hold different classes (`--config.data.shards=by_label`), 1500 steps with a
peak of the learning rate of 0.05 reach a test accuracy of 44.3 % (seed 0). In float32
(`--config.sync.dense_steps=100000`) they reach 55.4 %. So 2 % of the values are too few for this
network and so few steps.

`--config.sync.measure_xi=True` adds what Ok-Topk selects, delivers and misses to the metrics, and
`python -m benchmarks.sparse_run` plots it.

The network is that of the Ok-Topk paper; all settings are those of `configs/cifar_alexnet.py`, and
none was tuned.

References:
  S. Li, T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022,
  arXiv:2201.07598.
"""

from ml_collections import config_dict

from configs.bases import cifar10


def get_config() -> config_dict.ConfigDict:
    config = cifar10.get_config()
    config.steps = 35_000
    config.model.name = "vgg"
    config.model.width = 1.0  # Of the published channels.
    config.model.groups = 8

    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 0.01
    config.optimizer.momentum = 0.9
    config.optimizer.weight_decay = 5e-4

    config.sync.method = "sparse_mean"
    config.sync.density = 0.02  # The share of values that Ok-Topk selects.
    config.sync.bucket_mib = 8.0
    config.sync.dense_steps = 50  # Steps in float32 before the first sparse one.
    config.lock()
    return config
