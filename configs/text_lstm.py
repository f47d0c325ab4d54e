r"""A language model of LSTM layers, which predicts the next byte of a text, in 8 bits on the wire.

Four processes on this machine, which prepare the text themselves (Python's help texts, 0.4 MB):

    python -m train.launch --processes=4 -- --config=configs/text_lstm.py

The whole run has not been measured yet. On four simulated devices, half as wide and on 0.3 M
tokens:

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m train \
      --config=configs/text_lstm.py --config.model.width=128 --config.batch_size=16 \
      --config.steps=300 --config.sync.codec=CODEC

    codec     validation loss, in nats a byte (seed 0, help texts of Python 3.11.7)
    float32   2.5451
    cnat      2.5434
"""

from ml_collections import config_dict

from configs.bases import text


def get_config() -> config_dict.ConfigDict:
    config = text.get_config()
    config.steps = 1000
    config.batch_size = 32
    config.data.sequence_length = 64
    config.model.name = "lstm"
    config.model.width = 256
    config.model.layers = 2

    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 50

    config.sync.method = "mean"
    config.sync.codec = "cnat"
    config.lock()
    return config
