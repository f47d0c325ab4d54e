"""Fashion-MNIST, 28 x 28 pixels: `tfds build fashion_mnist --file_format=array_record`."""

from ml_collections import config_dict

from configs.bases import run


def get_config() -> config_dict.ConfigDict:
    config = run.get_config()
    config.batch_size = 128
    config.eval_every = 300
    config.data.name = "fashion_mnist"
    config.data.mean = 72.9  # Of the pixels.
    config.data.std = 90.0
    config.checkpoint.every = 300
    return config
