"""Text, a byte a token: Python's own help texts, which the programs prepare themselves.

Or another text of TensorFlow Datasets that has been prepared:

    tfds build tiny_shakespeare --file_format=array_record
    --config.data.name=tiny_shakespeare
"""

from ml_collections import config_dict

from configs.bases import run


def get_config() -> config_dict.ConfigDict:
    config = run.get_config()
    config.data.name = "python_topics"
    config.data.test_split = "validation"  # Or "test", when all settings are chosen.
    config.data.sequence_length = 256
    config.optimizer.name = "adamw"
    return config
