"""A small ResNet on scikit-learn's handwritten digits, 8 x 8 pixels, with bf16 on the wire.

Four processes on this machine, which prepare the data set themselves:

    python -m train.launch --processes=4 -- --config=configs/digits_resnet.py

Test accuracy 98.1 % (seed 0), in 64 s on 2 CPU cores that also did other work. CPU time was 70 s,
including the compilation in all four processes.
"""

from ml_collections import config_dict

from configs.bases import digits


def get_config() -> config_dict.ConfigDict:
    config = digits.get_config()
    config.model.name = "resnet"
    config.model.stages = (1, 1)
    config.model.width = 16
    config.model.groups = 8
    config.model.bottleneck = False
    config.model.large_stem = False

    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 0.1
    config.optimizer.warmup_steps = config.get_ref("steps") // 10  # For shorter runs too.
    config.optimizer.momentum = 0.9
    config.optimizer.weight_decay = 1e-3

    config.sync.method = "mean"
    config.sync.codec = "bfloat16"
    config.lock()
    return config
