r"""VGG-16 for CIFAR-10; the largest gradients travel, by Ok-Topk.

Four processes on this machine; the data set is where TFDS_DATA_DIR says, prepared as array_record:

    python -m train.launch --processes=4 -- --config=configs/cifar_vgg.py

It has 14,728,266 parameters and runs for 90 epochs. That takes a GPU, and was not measured. A
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
none was searched.

References:
  S. Li, T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022,
  arXiv:2201.07598.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    config = config_dict.ConfigDict()
    config.seed = 0
    config.steps = 35_000
    config.batch_size = 128  # Of all devices together.
    config.microbatches = 1  # Parts of a device's share that are computed one after another.
    config.label_smoothing = 0.0
    config.eval_every = 2000
    config.measure_steps = 40  # Timed with and without the exchange, after training.

    config.data = config_dict.ConfigDict()
    config.data.name = "cifar10"
    config.data.data_dir = ""  # TFDS_DATA_DIR, or ~/tensorflow_datasets.
    config.data.train_split = "train"
    config.data.test_split = "test"
    config.data.shards = "shuffled"  # Or "by_label": device i has the classes congruent to i.
    config.data.augment = "crop_flip"  # Or "none". Shifted by up to 4 pixels, mirrored.
    config.data.mean = 120.7  # Of the pixels of all three channels.
    config.data.std = 64.2

    config.model = config_dict.ConfigDict()
    config.model.name = "vgg"
    config.model.dtype = "float32"  # Of the computation; parameters are always float32.
    config.model.width = 1.0  # Of the published channels.
    config.model.groups = 8

    config.optimizer = config_dict.ConfigDict()
    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 0.01
    config.optimizer.warmup_steps = 400
    config.optimizer.momentum = 0.9
    config.optimizer.weight_decay = 5e-4

    config.sync = config_dict.ConfigDict()
    config.sync.method = "sparse_mean"
    config.sync.density = 0.02  # The share of values that is selected.
    config.sync.algorithm = "oktopk"  # Or a call, such as "oktopk(recompute_every=128)".
    config.sync.error_feedback = True
    config.sync.momentum_correction = config_dict.placeholder(float)  # Each device's own momentum.
    config.sync.measure_xi = False  # The distance to the true top-k in the metrics: costs a mean.
    config.sync.exempt = ()  # Patterns of further leaves that travel in float32.
    config.sync.dense_steps = 50  # Steps in float32 before the first sparse one.
    config.sync.bucket_mib = 8.0
    config.sync.implementation = config_dict.placeholder(str)  # Of kernels, such as "measure".

    config.checkpoint = config_dict.ConfigDict()
    config.checkpoint.every = 2000
    config.checkpoint.keep = 2
    config.checkpoint.resume = False

    config.network = config_dict.ConfigDict()
    config.network.gigabits = config_dict.placeholder(float)  # None: measured in the run.
    config.network.probe_mib = 16  # Size of the exchange that measures it.

    config.lock()
    return config
