"""`init` inside `jax.jit`, for parameters that are sharded over other axes."""

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxcomm import _paths
from jaxcomm._context import holding
from jaxcomm.transforms._layout import PATHS
from jaxcomm.transforms._specs import GIVEN_SPECS
from jaxcomm.transforms._wrappers import with_extra_args


def with_param_specs(
    tx: optax.GradientTransformation, specs: Any
) -> optax.GradientTransformationExtraArgs:
    """Lets `tx.init` be traced if parameters are sharded over other mesh axes.

    `tx.init` has to know how parameters are sharded, because residuals and momenta are sharded the
    same way. Outside `jax.jit` it looks at the parameters; inside, their types do not show it. So
    `jax.jit(tx.init, out_shardings=...)`, which makes the state of a large model, and
    `jax.eval_shape(tx.init, ...)` need this around `tx`, unless all axes are Explicit or there is
    only one. So does `tx.init` inside a `jax.shard_map` over further axes with check_vma=False.

    Args:
      tx: a transformation, usually the whole chain.
      specs: a pytree like the parameters, of `PartitionSpec`s, `NamedSharding`s, or arrays and
        `jax.ShapeDtypeStruct`s that have shardings.

    Returns:
      A transformation used like `tx`.

    Raises:
      TypeError: immediately for other leaves of `specs`.
      ValueError: by `init`, for a parameter whose spec is missing or differs, and inside of
        `jaxcomm.in_backward`.

    Wire: that of `tx`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm, optax
      >>> tx = optax.chain(jaxcomm.mean("data", "int8", error_feedback=True), optax.adam(1e-3))
      >>> tx = jaxcomm.with_param_specs(tx, {"w": jax.P("fsdp")})
      >>> mesh = jax.make_mesh((2, 2), ("data", "fsdp"), (jax.sharding.AxisType.Auto,) * 2)
      >>> with jax.set_mesh(mesh):
      ...     sharding = jax.NamedSharding(mesh, jax.P("fsdp"))
      ...     params = {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=sharding)}
      ...     specs = jaxcomm.state_spec(tx, params, mesh)
      ...     state = jax.jit(tx.init, out_shardings=specs)({"w": jnp.zeros((4, 8))})
      >>> state[0].residual.values[0].sharding.spec
      P('data', 'fsdp')
    """
    tx = with_extra_args(tx, "with_param_specs", "tx")
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec)
    given = {_paths.path_name(path): _spec_of(path, leaf) for path, leaf in leaves}

    def init_fn(params: Any) -> Any:
        if PATHS.get():
            raise ValueError(
                "with_param_specs is inside jaxcomm.in_backward, whose layers have other specs; "
                "put it around: jaxcomm.with_param_specs(jaxcomm.in_backward(...), specs)."
            )
        paths = [_paths.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        if lacking := [path for path in paths if path not in given]:
            raise ValueError(
                f"with_param_specs was given no spec for parameter {lacking[0]}; it has those of "
                f"{', '.join(list(given)[:10])}. Give it a pytree like the parameters."
            )
        with holding(GIVEN_SPECS, given):
            return tx.init(params)

    return optax.GradientTransformationExtraArgs(init_fn, tx.update)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _spec_of(path: Any, x: Any) -> PartitionSpec:
    sharding = getattr(x, "sharding", x)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"with_param_specs needs a PartitionSpec for parameter {_paths.path_name(path)}, "
            f"got {x!r}."
        )
    return spec
