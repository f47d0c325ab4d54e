"""CIFAR-10, 32 x 32 pixels: `tfds build cifar10 --file_format=array_record`."""

from ml_collections import config_dict

from configs.bases import run


def get_config() -> config_dict.ConfigDict:
    config = run.get_config()
    config.batch_size = 128
    config.eval_every = 2000
    config.data.name = "cifar10"
    config.data.augment = "crop_flip"
    config.data.mean = 120.7  # Of the pixels of all three channels.
    config.data.std = 64.2
    config.optimizer.warmup_steps = 400
    config.checkpoint.every = 2000
    return config
