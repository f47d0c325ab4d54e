r"""ResNet-20 on CIFAR-10 as its authors train it, with bf16 on the wire.

Four processes on this machine; the data set is where TFDS_DATA_DIR says, prepared as array_record:

    python -m train.launch --processes=4 -- --config=configs/cifar_resnet20.py

It runs for 64,000 steps, 164 epochs. That takes a GPU, and was not measured. A smaller run takes
minutes on 2 CPU cores: four devices that hold different classes, a fifth of the images, and a stem
that quarters their sides:

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m train \
      --config=configs/cifar_resnet20.py --config.sync.codec=float32 --config.steps=1500 \
      --config.data.train_split='train[:10000]' --config.data.shards=by_label \
      --config.model.large_stem=True --config.optimizer.warmup_steps=100 --config.eval_every=500

Test accuracy with seeds 0 to 2, and bytes a parameter and device:

    as above                    55.1, 54.9, 55.5 %      6.00
    --config.sync.codec=cnat    55.2, 56.5, 54.8 %      1.53

The training losses lie within 0.02 of each other (means of 3 seeds and 100 steps). The float32 runs
took 193 to 346 s on 2 CPU cores that had much other work. Of the images in this copy of the data
set, 97 are JPEG decodes.

Differs from the authors' paper: groups of channels are normalised instead of batches, the shortcuts
that change the shape are projections, momentum is Nesterov's, and the learning rate rises over 400
steps and then falls as a cosine, instead of by ten at steps 32,000 and 48,000.

References:
  K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", 2016,
  arXiv:1512.03385, section 4.2.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    config = config_dict.ConfigDict()
    config.seed = 0
    config.steps = 64_000
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
    config.model.name = "resnet"
    config.model.dtype = "float32"  # Of the computation; parameters are always float32.
    config.model.stages = (3, 3, 3)
    config.model.width = 16
    config.model.groups = 8
    config.model.bottleneck = False
    config.model.large_stem = False

    config.optimizer = config_dict.ConfigDict()
    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 0.1
    config.optimizer.warmup_steps = 400
    config.optimizer.momentum = 0.9
    config.optimizer.weight_decay = 1e-4

    config.sync = config_dict.ConfigDict()
    config.sync.method = "mean"  # Or "none": no exchange at all, a control.
    config.sync.codec = "bfloat16"  # Or a call, such as "qsgd(levels=7)".
    config.sync.algorithm = config_dict.placeholder(str)  # None: jaxcomm chooses.
    config.sync.second_hop = config_dict.placeholder(str)  # The way back; None: as `codec`.
    config.sync.error_feedback = False  # Whether devices keep what rounding takes away.
    config.sync.exempt = ()  # Patterns of further leaves that travel in float32.
    config.sync.dense_steps = 0  # Steps in float32 before any compression.
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
