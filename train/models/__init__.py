"""Models by name: `build` calls the factory with the fields of `config.model`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from train.errors import UserError, choose
from train.models.alexnet import AlexNet
from train.models.resnet import ResNet
from train.models.vgg import VGG
from train.models.vit import ViT

Params = dict[str, Any]

MODELS: dict[str, Callable[..., nnx.Module]] = {
    "alexnet": AlexNet,
    "vgg": VGG,
    "resnet": ResNet,
    "vit": ViT,
}


def build(
    config: Mapping[str, Any], image_shape: tuple[int, int, int], classes: int, seed: int
) -> tuple[nnx.GraphDef, Params]:
    """Makes the model that a config names, and its first parameters.

    Args:
      config: `name`, `dtype` (of the computation) and the arguments of that model's class.
      image_shape: height, width and channels of one image.
      classes: number of logits.
      seed: of the parameters, equal in all processes.

    Returns:
      The model without its parameters, and these as nested dicts of float32 arrays: what
      `nnx.merge` joins to a function from images `[batch, height, width, channels]` to logits.

    Raises:
      UserError: if there is no such model, or it refuses its arguments.
    """
    options = dict(config)
    factory = choose(MODELS, options.pop("name"), "config.model.name")

    def make() -> nnx.Module:
        dtype = jnp.dtype(options["dtype"])
        arguments = {**options, "image_shape": image_shape, "classes": classes, "dtype": dtype}
        return factory(**arguments, rngs=nnx.Rngs(seed))

    try:
        graph = nnx.graphdef(nnx.eval_shape(make))
    except (TypeError, ValueError) as error:
        raise UserError(f"config.model: {error}") from error
    # It runs once: to optimise it would take five times longer than to compile and run it.
    initialise = jax.jit(
        lambda: nnx.to_pure_dict(nnx.state(make(), nnx.Param)),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    return graph, initialise()
