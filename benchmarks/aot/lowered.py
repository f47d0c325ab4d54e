"""Steps of `benchmarks.gpu_steps`, lowered for a GPU on a machine without one.

    python -m benchmarks.aot.lowered TARGET FOLDER --model=resnet50 [--methods=int8,cnat]

It takes the packages of the `gpu-aot` extra, and the version of jax that the machine with the GPU
has. A file of FOLDER has the program of one method, and the names, shapes and dtypes of its
arguments. What a step starts from is drawn where it runs: normal parameters, a state of zeros.
"""

import argparse
import os
import pickle
import warnings
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export

import jaxcomm
from benchmarks.aot.gpu_models import METHODS, MODELS, SCALES, Model, optimizer, step_of
from benchmarks.aot.targets import TARGETS, mesh_of, placed
from benchmarks.arguments import one_of, several

# Calls in a program that `jax.export` does not know to be the same in later versions.
_CALLS = ("mosaic_gpu_v2", "__gpu$xla.gpu.triton")


class Lowered(NamedTuple):
    """A program that can be compiled, and what it is called with.

    Attributes:
      method: what it exchanges by.
      lowered: the program, as `jax.jit(...).lower(...)` returns it; it donates its state.
      arguments: lists of the leaves of the parameters, the state and the batch.
    """

    method: str
    lowered: Any
    arguments: list[list[jax.Array]]


def path_of(folder: Path, model: str, method: str) -> Path:
    """The file of a program."""
    return folder / f"{model}_{method}.pickle"


def write(path: Path, mesh: Any, model: Model, method: str) -> None:
    """Lowers the step of a method for the device of a mesh, and writes the program."""
    device = mesh.devices.ravel()[0]
    with jax.default_device(device), jax.set_mesh(mesh):
        tx = optimizer(model, method)
        params = placed(mesh, model.params, jax.P())
        state = jax.eval_shape(tx.init, params)
        spec = jax.P() if method == "none" else jaxcomm.state_spec(tx, params, mesh)
        state = placed(mesh, state, spec)
        arguments = (params, state, placed(mesh, model.batch, jax.P("data")))
        step = step_of(model, tx, exchanges=method != "none")
        treedefs = list(map(jax.tree.structure, arguments))

        def on_leaves(*leaves: list[jax.Array]) -> Any:
            args = [tree.unflatten(own) for tree, own in zip(treedefs, leaves, strict=True)]
            return tuple(jax.tree.leaves(result) for result in step(*args))

        flat = [jax.tree.leaves(argument) for argument in arguments]
        shardings = [[x.sharding for x in leaves] for leaves in flat[:2]]
        jitted = jax.jit(on_leaves, donate_argnums=(0, 1), out_shardings=(*shardings, None))
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in _CALLS]
        platform = "cpu" if device.platform == "cpu" else "cuda"
        program = export.export(jitted, platforms=[platform], disabled_checks=checks)(*flat)
    paths = map(jax.tree_util.tree_leaves_with_path, arguments)
    names = [[(jax.tree_util.keystr(key), x.shape, x.dtype.name) for key, x in p] for p in paths]
    options = jaxcomm.compiler_options()
    blob = zlib.compress(program.serialize(), 9)
    path.write_bytes(pickle.dumps((method, names, options, blob)))


def read(path: Path) -> Lowered:
    """The program of a file that `write` wrote, for the default device."""
    if jax.default_backend() == "gpu":  # they register the calls of their kernels
        from jax.experimental.pallas import mosaic_gpu, triton  # noqa: F401
    method, names, options, blob = pickle.loads(path.read_bytes())
    program = export.deserialize(bytearray(zlib.decompress(blob)))
    jitted = jax.jit(program.call, donate_argnums=(0, 1), compiler_options=options)
    rng = np.random.default_rng(0)
    arguments = [[_drawn(rng, i, *leaf) for leaf in part] for i, part in enumerate(names)]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    return Lowered(method, jitted.lower(*shapes), arguments)


def _drawn(rng: np.random.Generator, part: int, name: str, shape: Any, dtype: str) -> jax.Array:
    """A leaf of the parameters, the state or the batch."""
    if part == 2:
        return jax.device_put(rng.integers(0, 256, shape).astype(dtype))
    if "scale" in name and part == 0:
        return jax.device_put(np.ones(shape, dtype))
    if part == 0 or "factors" in name:  # low ranks start from some columns
        return jax.device_put((0.02 * rng.standard_normal(shape)).astype(dtype))
    return jax.device_put(np.zeros(shape, dtype))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot.lowered", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("target", choices=[*sorted(TARGETS), "cpu"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="resnet50", choices=sorted(MODELS))
    parser.add_argument("--methods", type=several(one_of(METHODS)), default=list(METHODS))
    parser.add_argument("--scale", default="full", choices=("tiny", "full"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*before an optimizer that keeps a variance")
    args.folder.mkdir(parents=True, exist_ok=True)
    model = MODELS[args.model](**SCALES[args.model][args.scale])
    here = args.target == "cpu"
    mesh = jaxcomm.data_mesh(devices=jax.devices()[:1]) if here else mesh_of(args.target, 1)
    for method in ["none", *args.methods]:
        path = path_of(args.folder, args.model, method)
        write(path, mesh, model, method)
        print(f"{path}: {os.path.getsize(path) >> 10} KiB", flush=True)


if __name__ == "__main__":
    main()
