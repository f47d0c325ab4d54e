"""One bit with Adam: a small vision transformer on scikit-learn's handwritten digits.

Four processes on this machine, which prepare the data set themselves:

    python -m train.launch --processes=4 -- --config=configs/digits_vit_one_bit.py

Gradients are divided by factored Adam's estimate of their size, and the momentum that all devices
share travels as signs, without a dense warm-up. `configs/digits_vit.py` has the same model with
AdamW.
"""

from ml_collections import config_dict

from configs import digits_vit


def get_config() -> config_dict.ConfigDict:
    config = digits_vit.get_config()
    config.optimizer.name = "scale"  # The optimizer is in the exchange.
    config.optimizer.learning_rate = 6e-3  # Twice that of Adam.
    config.sync.method = "factored_adam"
    config.sync.b1 = 0.9
    config.sync.b2 = 0.99
    config.sync.eps = 1e-8
    config.sync.weight_decay = 1.0
    config.sync.codec = "scaled_sign(block_size=128)"  # Or any other; its errors are fed back.
    config.lock()
    return config
