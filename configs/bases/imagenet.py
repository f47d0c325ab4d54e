"""ImageNet, cut to 224 x 224 pixels: `tfds build imagenet2012 --file_format=array_record`.

The two archives of images must be downloaded by hand first; the program says which. 1,281,167
training images and 50,000 test images are decoded when they are needed.
"""

from ml_collections import config_dict

from configs.bases import run


def get_config() -> config_dict.ConfigDict:
    config = run.get_config()
    config.batch_size = 1024
    config.steps = 112_603  # 90 epochs.
    config.eval_every = 12_511  # 10 epochs.
    config.data.name = "imagenet2012"
    config.data.test_split = "validation"
    config.data.image_size = 224
    config.data.augment = "crop_flip"
    config.data.mean = (123.7, 116.3, 103.5)  # Of the pixels of each channel.
    config.data.std = (58.4, 57.1, 57.4)
    config.model.dtype = "bfloat16"
    config.checkpoint.every = 1251  # An epoch.
    config.sync.method = "mean"
    config.sync.codec = "bfloat16"
    return config
