"""ResNet-50 on ImageNet, 90 epochs, with bf16 on the wire.

On the first machine of a cluster (`docs/training.md` has the other ways to start):

    configs/cluster/bare_ssh.sh node0 node1 -- --config=configs/imagenet_resnet50.py --workdir=DIR

25.56 M parameters. Nothing was measured: neither hours nor accuracy. It is meant for eight GPUs or
more with 24 GB each; on fewer, raise `--config.microbatches`. For reference, the group
normalization paper has 75.9 % with this network in 100 epochs.

Differs from that paper: 90 epochs, batches of 1024, label smoothing, Nesterov momentum, and a
learning rate that falls as a cosine.

References:
  Y. Wu, K. He, "Group Normalization", 2018, arXiv:1803.08494.
  P. Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677 (learning rate, warm-up).
"""

from ml_collections import config_dict

from configs.bases import imagenet


def get_config() -> config_dict.ConfigDict:
    config = imagenet.get_config()
    config.label_smoothing = 0.1
    config.model.name = "resnet"
    config.model.stages = (3, 4, 6, 3)
    config.model.width = 64
    config.model.groups = 32
    config.model.bottleneck = True
    config.model.large_stem = True

    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 0.4  # 0.1 for each 256 images of a batch.
    config.optimizer.warmup_steps = 6256  # 5 epochs.
    config.optimizer.momentum = 0.9
    config.optimizer.weight_decay = 1e-4
    config.lock()
    return config
