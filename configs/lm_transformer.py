r"""A GPT of scanned layers that predicts the next byte of a text, with bf16 on the wire.

Four processes on this machine, which prepare the text themselves (Python's help texts, 0.4 MB):

    python -m train.launch --processes=4 -- --config=configs/lm_transformer.py

The size follows the name of the file, as in lm_transformer.py:nano. Parameters are placed in one of
three ways: on every device; split over all (FSDP, `--config.sync.gather=bfloat16`); or split within
groups of N neighbours, with the exchange between the groups (HSDP, `--config.sync.fsdp=N`).

A smaller one, of 0.4 M parameters on 0.3 M tokens, on four simulated devices:

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m train \
      --config=configs/lm_transformer.py:nano --config.model.depth=2 --config.batch_size=16 \
      --config.data.sequence_length=64 --config.steps=300 --config.sync.codec=CODEC

    codec     validation loss, in nats a byte (seed 0, help texts of Python 3.11.7)
    float32   2.3602
    bfloat16  2.3602
    cnat      2.3731

With Muon (`--config.optimizer.name=muon`), and AdamW at other rates, in float32 and in 8 bits:

    learning rate  2e-3    4e-3    8e-3    16e-3
    AdamW          2.2578  2.2989  2.3405
    Muon           2.1038  1.8313  1.6663  1.6175
    Muon, int8                     1.6692  1.6268

In float32, FSDP (`--config.sync.gather=float32`) and HSDP (`--config.sync.fsdp=2`) have the same
validation loss to 1e-7, with AdamW and, at 8e-3, with Muon. Muon at 8e-3 as FSDP, with gradients,
parameters and Muon's parts in one codec (`--config.sync.gather=CODEC`), and what a device sends:

    codec     validation loss  bytes a parameter
    float32   1.6663           8.47
    bfloat16  1.6661           4.26
    int8      1.6666           2.19

The default size has not been trained to its end. In 100 steps of a small batch
(`--config.batch_size=8 --config.data.sequence_length=64 --config.steps=100
--config.optimizer.warmup_steps=10`) it had, on the same devices:

    float32, and as FSDP and HSDP   2.81253
    bfloat16                        2.81254
    cnat                            2.80875
"""

from ml_collections import config_dict

from configs.bases import text

# Layers, width, heads. With 256 tokens they have 0.9 M, 10.9 M, 85 M, 303 M, 681 M and 1.2 G
# parameters; the last four are GPT-3's of 125 M to 1.3 G without its large vocabulary.
SIZES = {
    "nano": (4, 128, 4),
    "mini": (6, 384, 6),
    "small": (12, 768, 12),
    "medium": (24, 1024, 16),
    "large": (24, 1536, 16),
    "xl": (24, 2048, 16),
}


def get_config(size: str = "mini") -> config_dict.ConfigDict:
    if size not in SIZES:
        raise ValueError(f"there is no size {size!r}; it is one of {', '.join(SIZES)}")
    config = text.get_config()
    config.steps = 1000
    config.batch_size = 32
    config.model.name = "transformer"
    config.model.depth, config.model.width, config.model.heads = SIZES[size]
    config.model.mlp_width = 4 * config.model.width
    config.model.recompute = size not in ("nano", "mini")  # Compute layers twice to save memory.

    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.weight_decay = 0.1

    config.sync.method = "mean"
    config.sync.codec = "bfloat16"
    config.lock()
    return config
