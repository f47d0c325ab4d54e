"""Models by name: `build` calls the factory with the fields of `config.model`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from train.errors import UserError, choose
from train.models.alexnet import AlexNet
from train.models.bert import BERT
from train.models.lstm import LSTM
from train.models.resnet import ResNet
from train.models.transformer import Transformer
from train.models.vgg import VGG
from train.models.vit import ViT

Params = dict[str, Any]

MODELS: dict[str, Callable[..., nnx.Module]] = {
    "alexnet": AlexNet,
    "vgg": VGG,
    "resnet": ResNet,
    "vit": ViT,
    "lstm": LSTM,
    "bert": BERT,
    "transformer": Transformer,
}
TEXT = ("lstm", "bert", "transformer")  # They take tokens; the others take images.


def build(
    config: Mapping[str, Any], shape: tuple[int, ...], classes: int, seed: int
) -> tuple[nnx.GraphDef, Params]:
    """Makes the model that a config names, and its first parameters.

    Args:
      config: `name`, `dtype` (of the computation) and the arguments of that model's class.
      shape: height, width and channels of one image, or the number of tokens in a row.
      classes: number of logits: classes of images, or the vocabulary.
      seed: the seed of the parameters, equal in all processes.

    Returns:
      The model without its parameters, and the parameters as nested dicts of float32 arrays.
      `nnx.merge` joins them to a function from images `[batch, height, width, channels]` to logits,
      or from tokens `[batch, length]` to logits at every position.

    Raises:
      UserError: if there is no such model, or it refuses its arguments.
    """
    options = dict(config)
    name = options.pop("name")
    factory = choose(MODELS, name, "config.model.name")
    if (name in TEXT) != (len(shape) == 1):
        kind = "tokens" if name in TEXT else "images"
        raise UserError(f"config.model.name={name} takes {kind}, which config.data does not have")
    if name in TEXT:
        sizes = {"length": shape[0], "vocabulary": classes}
    else:
        sizes = {"image_shape": shape, "classes": classes}

    def make() -> nnx.Module:
        dtype = jnp.dtype(options["dtype"])
        return factory(**{**options, **sizes, "dtype": dtype}, rngs=nnx.Rngs(seed))

    try:
        graph = nnx.graphdef(nnx.eval_shape(make))
    except (TypeError, ValueError) as error:
        raise UserError(f"config.model: {error}") from error
    # It runs once: optimising it would take five times longer than compiling and running it
    # without.
    initialise = jax.jit(
        lambda: nnx.to_pure_dict(nnx.state(make(), nnx.Param)),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    return graph, initialise()
