"""The vision transformer of digits_vit, whose devices exchange in every eighth step, in 4 bits.

    python -m train.launch --processes=4 -- --config=configs/digits_vit_local.py

Each device takes eight AdamW steps on its own, and the changes are averaged: local SGD.
Test accuracy 98.3 % (seed 0) at 0.12 bytes a parameter, device and step; in bfloat16 after every
step, 98.9 % at 3.07.
"""

from ml_collections import config_dict

from configs import digits_vit


def get_config() -> config_dict.ConfigDict:
    config = digits_vit.get_config()
    config.sync.codec = "int4"
    config.sync.error_feedback = True
    config.sync.every = 8
    config.lock()
    return config
