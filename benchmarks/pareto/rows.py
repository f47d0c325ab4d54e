"""The rows of each task."""

from benchmarks.pareto.methods import ADAM, for_nesterov, for_sgd
from benchmarks.pareto.muon import MUON

TABLES = {
    "gpt": ADAM | MUON,
    "gpt_small": ADAM | MUON,
    "lstm": for_sgd(4.0, 16e-3),
    "lstm_nesterov": for_nesterov(4.0, 8e-3),
    "resnet20": for_sgd(0.1, 1e-3),
    "resnet20_nesterov": for_nesterov(0.05, 5e-4),
}
