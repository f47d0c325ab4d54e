r"""BERT on bytes: 15 % of a text is hidden and predicted from the rest, with bf16 on the wire.

Four processes on this machine, which prepare the text themselves (Python's help texts, 0.4 MB):

    python -m train.launch --processes=4 -- --config=configs/text_bert.py

The size follows the name of the file, as in text_bert.py:tiny. The default size has not been
trained to the end: neither hours nor score were measured. Expect a loss below that of the smallest
size, which was trained for 600 steps on one CPU device:

    python -m train --config=configs/text_bert.py:tiny --config.steps=600

    step   validation loss, in nats a hidden byte (seed 0, help texts of Python 3.11.7)
    100    3.112
    200    2.804
    300    2.724
    400    2.640
    500    2.561
    600    2.553, and 37.4 % of the hidden bytes are right

Predicting each byte by its frequency in the training text has a loss of 3.295. The run took 4.4
minutes of CPU time, including the compilation.
"""

from ml_collections import config_dict

from configs.bases import text

# Layers, width, heads: the sizes of Turc et al. (2019, arXiv:1908.08962).
SIZES = {
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "medium": (8, 512, 8),
    "base": (12, 768, 12),
}


def get_config(size: str = "mini") -> config_dict.ConfigDict:
    if size not in SIZES:
        raise ValueError(f"there is no size {size!r}; it is one of {', '.join(SIZES)}")
    config = text.get_config()
    config.steps = 4000
    config.batch_size = 32
    config.data.sequence_length = 128
    config.data.masked = 0.15
    config.model.name = "bert"
    config.model.depth, config.model.width, config.model.heads = SIZES[size]
    config.model.mlp_width = 4 * config.model.width
    config.model.positions = 512

    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.weight_decay = 0.01

    config.sync.method = "mean"
    config.sync.codec = "bfloat16"
    config.lock()
    return config
