"""optax transformations: state, pytrees, buckets, and the two views of one step."""

from jaxcomm.transforms.control_variates import ControlVariatesState, control_variates
from jaxcomm.transforms.factored_adam import FactoredAdamState, factored_adam
from jaxcomm.transforms.gather import gather
from jaxcomm.transforms.in_backward import InBackward, InBackwardState, in_backward
from jaxcomm.transforms.local import LocalState, local
from jaxcomm.transforms.local_params import LocalStepsState, local_params
from jaxcomm.transforms.local_steps import local_steps
from jaxcomm.transforms.low_rank_mean import LowRankMeanState, low_rank_mean
from jaxcomm.transforms.majority_vote import MajorityVoteState, majority_vote
from jaxcomm.transforms.mean import MeanState, mean
from jaxcomm.transforms.multi_steps import MultiStepsState, multi_steps
from jaxcomm.transforms.no_exchange import NoExchangeState, no_exchange
from jaxcomm.transforms.one_bit_adam import OneBitAdamState, one_bit_adam
from jaxcomm.transforms.orthogonalize import orthogonalize
from jaxcomm.transforms.per_device import PerDevice, state_spec
from jaxcomm.transforms.resize_state import resize_state
from jaxcomm.transforms.set_to_zero import SetToZeroState, set_to_zero
from jaxcomm.transforms.shard import shard
from jaxcomm.transforms.sharded import sharded
from jaxcomm.transforms.sharded_params import ShardedState, sharded_params
from jaxcomm.transforms.sparse_mean import SparseMeanState, SparseReport, sparse_mean
from jaxcomm.transforms.stages import StagesState, dense_first, stages
from jaxcomm.transforms.with_layer_axis import with_layer_axis
from jaxcomm.transforms.with_param_specs import with_param_specs

__all__ = [
    "ControlVariatesState",
    "FactoredAdamState",
    "InBackward",
    "InBackwardState",
    "LocalState",
    "LocalStepsState",
    "LowRankMeanState",
    "MajorityVoteState",
    "MeanState",
    "MultiStepsState",
    "NoExchangeState",
    "OneBitAdamState",
    "PerDevice",
    "SetToZeroState",
    "ShardedState",
    "SparseMeanState",
    "SparseReport",
    "StagesState",
    "control_variates",
    "dense_first",
    "factored_adam",
    "gather",
    "in_backward",
    "local",
    "local_params",
    "local_steps",
    "low_rank_mean",
    "majority_vote",
    "mean",
    "multi_steps",
    "no_exchange",
    "one_bit_adam",
    "orthogonalize",
    "resize_state",
    "set_to_zero",
    "shard",
    "sharded",
    "sharded_params",
    "sparse_mean",
    "stages",
    "state_spec",
    "with_layer_axis",
    "with_param_specs",
]
