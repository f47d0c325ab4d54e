"""The parameters of a checkpoint in a program of its own, on one device: WORKDIR."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from train.models import ResNet  # or a module of yours, with parameters of the same names

workdir = Path(sys.argv[1]).absolute()
config = json.loads((workdir / "config.json").read_text())
options = {**config["model"], "dtype": jnp.float32}
del options["name"]
model = ResNet(image_shape=(8, 8, 1), classes=10, rngs=nnx.Rngs(0), **options)

device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
params = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
    {"params": nnx.to_pure_dict(nnx.state(model, nnx.Param))},
)
read = ocp.args.PyTreeRestore(
    params,
    restore_args=ocp.checkpoint_utils.construct_restore_args(params),
    partial_restore=True,  # no optimizer, and nothing of the exchange
)
with ocp.CheckpointManager(workdir / "checkpoints") as checkpoints:
    step = checkpoints.latest_step()
    saved = checkpoints.restore(step, args=ocp.args.Composite(state=read))["state"]
nnx.update(model, saved["params"])


def logits(images):
    """Of images with pixels from 0 to 255, as the run has normalised them."""
    data = config["data"]
    pixels = (np.asarray(images, np.float32) - data["mean"]) / data["std"]
    return model(jnp.asarray(pixels, jnp.float32))


print(f"step {step}: {logits(np.zeros((1, 8, 8, 1))).shape[1]} classes")
