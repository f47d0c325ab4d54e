"""ViT-S/16 on ImageNet, 90 epochs, with bf16 on the wire.

On the first machine of a cluster (`docs/training.md` has the other ways to start):

    configs/cluster/bare_ssh.sh node0 node1 -- --config=configs/imagenet_vit_s16.py --workdir=DIR

22.05 M parameters. Nothing was measured: neither hours nor accuracy. It is meant for eight GPUs or
more with 24 GB each; on fewer, raise `--config.microbatches`. For reference, the paper has 76.5 %,
with mixup, which is missing here.

Differs from the paper: no mixup, no clipping of the gradient's norm, learned embeddings of
positions.

References:
  L. Beyer, X. Zhai, A. Kolesnikov, "Better plain ViT baselines for ImageNet-1k", 2022,
  arXiv:2205.01580.
"""

from ml_collections import config_dict

from configs.bases import imagenet


def get_config() -> config_dict.ConfigDict:
    config = imagenet.get_config()
    config.data.augment = "rand_augment(layers=2, magnitude=10)"
    config.model.name = "vit"
    config.model.patch = 16
    config.model.width = 384
    config.model.depth = 12
    config.model.heads = 6
    config.model.mlp_width = 1536

    config.optimizer.name = "adamw"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 10_000
    config.optimizer.weight_decay = 0.1  # Times the learning rate: 1e-4 at its peak.
    config.lock()
    return config
