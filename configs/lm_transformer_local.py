r"""The GPT of lm_transformer, whose devices exchange signs in every fourth step.

    python -m train.launch --processes=4 -- --config=configs/lm_transformer_local.py

Each device takes four AdamW steps on its own, with half of the usual momentum. Its change is
exchanged as scaled signs with error feedback, and is the gradient of an outer SGD with Nesterov
momentum. The size follows the name of the file, as in lm_transformer_local.py:nano.

Validation losses with the command in lm_transformer.py, for 0.4 M parameters (seed 0), at 0.060
bytes a parameter, device and step, beside float32's at 6:

    learning rate  5e-4    1e-3    2e-3
    this           2.3790  2.3323  2.3343
    float32                2.3602  2.2578
"""

from ml_collections import config_dict

from configs import lm_transformer


def get_config(size: str = "mini") -> config_dict.ConfigDict:
    config = lm_transformer.get_config(size)
    config.optimizer.momentum = 0.5
    config.sync.codec = "scaled_sign"
    config.sync.error_feedback = True
    config.sync.every = 4
    config.sync.outer_momentum = 0.75
    config.lock()
    return config
