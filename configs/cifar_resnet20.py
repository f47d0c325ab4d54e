r"""ResNet-20 on CIFAR-10 as its authors train it, with bf16 on the wire.

Four processes on this machine; the data set is in TFDS_DATA_DIR, prepared as array_record:

    python -m train.launch --processes=4 -- --config=configs/cifar_resnet20.py

It runs for 64,000 steps, 164 epochs. That needs a GPU, and was not measured. A smaller run takes
minutes on 2 CPU cores: four devices that hold different classes, a fifth of the images, and a stem
that quarters their sides:

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m train \
      --config=configs/cifar_resnet20.py --config.sync.codec=float32 --config.steps=1500 \
      --config.data.train_split='train[:10000]' --config.data.shards=by_label \
      --config.model.large_stem=True --config.optimizer.warmup_steps=100 --config.eval_every=500

Test accuracy with seeds 0 to 2, and bytes a parameter and device:

    as above                    55.1, 54.9, 55.5 %      6.00
    --config.sync.codec=cnat    55.2, 56.5, 54.8 %      1.53

The training losses lie within 0.02 of each other (means of 3 seeds and 100 steps). The float32 runs
took 193 to 346 s on 2 CPU cores that did much other work. Of the images in this copy of the data
set, 97 are JPEG decodes.

Differs from the authors' paper: groups of channels are normalised instead of batches, the shortcuts
that change the shape are projections, momentum is Nesterov's, and the learning rate rises over 400
steps and then falls as a cosine, instead of by ten at steps 32,000 and 48,000.

References:
  K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", 2016,
  arXiv:1512.03385, section 4.2.
"""

from ml_collections import config_dict

from configs.bases import cifar10


def get_config() -> config_dict.ConfigDict:
    config = cifar10.get_config()
    config.steps = 64_000
    config.model.name = "resnet"
    config.model.stages = (3, 3, 3)
    config.model.width = 16
    config.model.groups = 8
    config.model.bottleneck = False
    config.model.large_stem = False

    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 0.1
    config.optimizer.momentum = 0.9
    config.optimizer.weight_decay = 1e-4

    config.sync.method = "mean"
    config.sync.codec = "bfloat16"
    config.lock()
    return config
