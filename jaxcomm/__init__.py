"""Communication-efficient data-parallel training for JAX.

The contents, in reading order: the mesh, gradients that stay local, the transformation that
exchanges them, what it is made of, and what it sent.
"""

from jaxcomm import codecs
from jaxcomm.collectives import (
    circulant,
    direct,
    gaussiank,
    gtopk,
    halving_doubling,
    hierarchical,
    native,
    oktopk,
    pmean,
    ring,
    topk_allgather,
    topk_dsa,
)
from jaxcomm.compiling import compiler_options
from jaxcomm.mesh import data_mesh, global_batch, replicate
from jaxcomm.transforms import (
    accumulate,
    backward_order,
    control_variates,
    local,
    majority_vote,
    mean,
    multi_steps,
    no_exchange,
    one_bit_adam,
    sparse_mean,
    stages,
    state_spec,
    value_and_grad,
    warmup,
)
from jaxcomm.wire import WireReport, wire_report

__all__ = [
    "WireReport",
    "accumulate",
    "backward_order",
    "circulant",
    "codecs",
    "compiler_options",
    "control_variates",
    "data_mesh",
    "direct",
    "gaussiank",
    "global_batch",
    "gtopk",
    "halving_doubling",
    "hierarchical",
    "local",
    "majority_vote",
    "mean",
    "multi_steps",
    "native",
    "no_exchange",
    "oktopk",
    "one_bit_adam",
    "pmean",
    "replicate",
    "ring",
    "sparse_mean",
    "stages",
    "state_spec",
    "topk_allgather",
    "topk_dsa",
    "value_and_grad",
    "warmup",
    "wire_report",
]
