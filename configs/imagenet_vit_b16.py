"""ViT-B/16 on ImageNet, 90 epochs, with bf16 on the wire.

    configs/cluster/bare_ssh.sh node0 node1 -- --config=configs/imagenet_vit_b16.py --workdir=DIR

86.57 M parameters. Nothing was measured: neither hours nor accuracy. It is meant for eight GPUs or
more with 40 GB each; on fewer, raise `--config.microbatches`. All settings but the size are those
of `configs/imagenet_vit_s16.py`; none was tuned for this size.
"""

from ml_collections import config_dict

from configs import imagenet_vit_s16


def get_config() -> config_dict.ConfigDict:
    config = imagenet_vit_s16.get_config()
    config.model.width = 768
    config.model.heads = 12
    config.model.mlp_width = 3072
    config.lock()
    return config
