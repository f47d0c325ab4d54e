r"""ResNet-110 on CIFAR-10 as its authors train it, with bf16 on the wire.

Four processes on this machine; the data set is in TFDS_DATA_DIR, prepared as array_record:

    python -m train.launch --processes=4 -- --config=configs/cifar_resnet110.py

It has 1.73 M parameters and runs for 64,000 steps, 164 epochs. That needs a GPU, and was not
measured.

Differs from the authors' paper: groups of channels are normalised instead of batches, the shortcuts
that change the shape are projections, momentum is Nesterov's, and the learning rate rises over 400
steps and then falls as a cosine, instead of by ten at steps 32,000 and 48,000. ResNet-110 on
CIFAR-10 is one of the cases of the natural compression paper.

References:
  K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", 2016,
  arXiv:1512.03385, section 4.2.
  S. Horvath et al., "Natural Compression for Distributed Deep Learning", 2019, arXiv:1905.10988.
"""

from ml_collections import config_dict

from configs import cifar_resnet20


def get_config() -> config_dict.ConfigDict:
    config = cifar_resnet20.get_config()
    config.model.stages = (18, 18, 18)
    config.lock()
    return config
