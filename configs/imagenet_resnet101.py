"""ResNet-101 on ImageNet, 90 epochs, with bf16 on the wire.

    configs/cluster/bare_ssh.sh node0 node1 -- --config=configs/imagenet_resnet101.py --workdir=DIR

44.55 M parameters. Nothing was measured: neither hours nor accuracy. It is meant for eight GPUs or
more with 24 GB each; on fewer, raise `--config.microbatches`. All settings but the depth are those
of `configs/imagenet_resnet50.py`, and its accuracy is what this network has to exceed.
"""

from ml_collections import config_dict

from configs import imagenet_resnet50


def get_config() -> config_dict.ConfigDict:
    config = imagenet_resnet50.get_config()
    config.model.stages = (3, 4, 23, 3)
    config.lock()
    return config
