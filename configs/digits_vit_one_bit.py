"""One bit with Adam: a small vision transformer on scikit-learn's handwritten digits.

Four processes on this machine, which prepare the data set themselves:

    python -m train.launch --processes=4 -- --config=configs/digits_vit_one_bit.py

Gradients are divided by what factored Adam knows of their size, and the momentum that all devices
share travels as signs, without a dense warm-up. `configs/digits_vit.py` has the same model with
AdamW.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    config = config_dict.ConfigDict()
    config.seed = 0
    config.steps = 600
    config.batch_size = 64  # Of all devices together.
    config.microbatches = 1  # Parts of a device's share that are computed one after another.
    config.label_smoothing = 0.1
    config.eval_every = 100
    config.measure_steps = 40  # Timed with and without the exchange, after training.

    config.data = config_dict.ConfigDict()
    config.data.name = "digits"
    config.data.data_dir = ""  # TFDS_DATA_DIR, or ~/tensorflow_datasets.
    config.data.train_split = "train"
    config.data.test_split = "test"
    config.data.shards = "shuffled"  # Or "by_label": device i has the classes congruent to i.
    config.data.augment = "none"  # Or "crop_flip": shifted by up to 4 pixels, mirrored.
    config.data.mean = 4.9  # Of the pixels.
    config.data.std = 6.0

    config.model = config_dict.ConfigDict()
    config.model.name = "vit"
    config.model.dtype = "float32"  # Of the computation; parameters are always float32.
    config.model.patch = 4
    config.model.width = 64
    config.model.depth = 2
    config.model.heads = 4
    config.model.mlp_width = 128

    config.optimizer = config_dict.ConfigDict()
    config.optimizer.name = "scale"  # The optimizer is in the exchange.
    config.optimizer.learning_rate = 6e-3  # About twice that of Adam.
    config.optimizer.warmup_steps = 50

    config.sync = config_dict.ConfigDict()
    config.sync.method = "factored_adam"
    config.sync.b1 = 0.9
    config.sync.b2 = 0.99
    config.sync.eps = 1e-8
    config.sync.weight_decay = 1.0
    config.sync.codec = "scaled_sign(block_size=128)"  # Or any other; its errors are fed back.
    config.sync.algorithm = config_dict.placeholder(str)  # None: jaxcomm chooses.
    config.sync.second_hop = config_dict.placeholder(str)  # The way back; None: as `codec`.
    config.sync.exempt = ()  # Patterns of further leaves that travel in float32.
    config.sync.bucket_mib = 8.0
    config.sync.implementation = config_dict.placeholder(str)  # Of kernels, such as "measure".

    config.checkpoint = config_dict.ConfigDict()
    config.checkpoint.every = 100
    config.checkpoint.keep = 2
    config.checkpoint.resume = False

    config.network = config_dict.ConfigDict()
    config.network.gigabits = config_dict.placeholder(float)  # None: measured in the run.
    config.network.probe_mib = 16  # Size of the exchange that measures it.

    config.lock()
    return config
