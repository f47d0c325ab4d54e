"""Communication-efficient data-parallel training for JAX.

The contents, in reading order: the mesh, gradients that stay local, the transformations that
exchange them, what these are made of, and what they sent.
"""

from jaxcomm import codecs
from jaxcomm._marks import mark_local, unmark_local
from jaxcomm.collectives import algorithms, pmean, sparse
from jaxcomm.compiling import compiler_options
from jaxcomm.gradients import accumulate, backward_order, value_and_grad
from jaxcomm.mesh import data_mesh, global_batch, replicate
from jaxcomm.simulation import simulate_devices
from jaxcomm.transforms import (
    ControlVariatesState,
    FactoredAdamState,
    LocalState,
    LocalStepsState,
    LowRankMeanState,
    MajorityVoteState,
    MeanState,
    MultiStepsState,
    NoExchangeState,
    OneBitAdamState,
    SparseMeanState,
    SparseReport,
    StagesState,
    control_variates,
    dense_first,
    factored_adam,
    local,
    local_params,
    local_steps,
    low_rank_mean,
    majority_vote,
    mean,
    multi_steps,
    no_exchange,
    one_bit_adam,
    resize_state,
    set_to_zero,
    sparse_mean,
    stages,
    state_spec,
    with_layer_axis,
    with_param_specs,
)
from jaxcomm.wire import WireReport, wire_report

__version__ = "0.1.0"

__all__ = [
    "ControlVariatesState",
    "FactoredAdamState",
    "LocalState",
    "LocalStepsState",
    "LowRankMeanState",
    "MajorityVoteState",
    "MeanState",
    "MultiStepsState",
    "NoExchangeState",
    "OneBitAdamState",
    "SparseMeanState",
    "SparseReport",
    "StagesState",
    "WireReport",
    "accumulate",
    "algorithms",
    "backward_order",
    "codecs",
    "compiler_options",
    "control_variates",
    "data_mesh",
    "dense_first",
    "factored_adam",
    "global_batch",
    "local",
    "local_params",
    "local_steps",
    "low_rank_mean",
    "majority_vote",
    "mark_local",
    "mean",
    "multi_steps",
    "no_exchange",
    "one_bit_adam",
    "pmean",
    "replicate",
    "resize_state",
    "set_to_zero",
    "simulate_devices",
    "sparse",
    "sparse_mean",
    "stages",
    "state_spec",
    "unmark_local",
    "value_and_grad",
    "wire_report",
    "with_layer_axis",
    "with_param_specs",
]
