"""Scikit-learn's handwritten digits, 8 x 8 pixels: the programs prepare them themselves."""

from ml_collections import config_dict

from configs.bases import run


def get_config() -> config_dict.ConfigDict:
    config = run.get_config()
    config.steps = 500
    config.label_smoothing = 0.1
    config.inspect.every = 0  # Looks are a separate program: a third of such a short run.
    config.data.name = "digits"
    config.data.mean = 4.9  # Of the pixels.
    config.data.std = 6.0
    return config
