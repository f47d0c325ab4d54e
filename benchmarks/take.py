"""What users are told to take: the table of the README, from the results of other benchmarks.

Losses are those of `python -m benchmarks.pareto`: on the larger GPT with Adam, and on the LSTM and
the ResNet-20 with SGD and Nesterov's momentum, or, where the ResNet-20 has no such run, with plain
momentum. Steps are those of `python -m benchmarks.allreduce --peers` and
`python -m benchmarks.chain_steps`.
"""

import collections
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pareto import results as front

CHAIN_STEPS = Path(__file__).parent / "results" / "chain_steps.json"
Timed = Mapping[str, Mapping[str, Any]]


class Take(NamedTuple):
    """A row of what to take.

    Attributes:
      optimizer: that it is for.
      code: what to write, or its name.
      link: its name where whole steps on links were measured, or empty.
      adam: its name on the GPT, or empty.
      sgd: its name on the LSTM and the ResNet-20, or empty.
      step: its name where steps of chains were measured, or empty.
    """

    optimizer: str
    code: str
    link: str = ""
    adam: str = ""
    sgd: str = ""
    step: str = ""


TAKE = (
    Take("any", '`jaxcomm.mean("data")`', "float32", "float32", "float32"),
    Take("any", '`jaxcomm.mean("data", "bfloat16")`', "bfloat16", "bfloat16", "bfloat16"),
    Take("any", '`jaxcomm.mean("data", "cnat")`', "cnat", "cnat", "cnat"),
    Take(
        "any",
        '`jaxcomm.mean("data", "int4", error_feedback=True)`',
        "int4",
        "int4, feedback",
        "int4, feedback",
    ),
    Take(
        "Adam",
        "`jaxcomm.factored_adam` of `scaled_sign(128)`, `nesterov=True`",
        adam="factored Nadam, scaled_sign(128)",
        step="factored_adam",
    ),
    Take(
        "Adam",
        "each device's Nadam by `jaxcomm.local`, then scaled signs",
        adam="local Nadam, scaled_sign",
        step="local_adam",
    ),
    Take(
        "Adam",
        "`jaxcomm.local_steps`: scaled signs in every 4th step, outer momentum",
        adam="4 local steps, scaled_sign, outer momentum",
        step="local_steps",
    ),
    Take(
        "SGD",
        '`jaxcomm.low_rank_mean("data", 4)`',
        "powersgd4",
        adam="PowerSGD, rank 4",
        sgd="PowerSGD, rank 4",
    ),
    Take(
        "SGD",
        "each device's momentum by `jaxcomm.local`, then scaled signs",
        sgd="local momentum, scaled_sign",
        step="local_momentum",
    ),
    Take(
        "SGD",
        '`jaxcomm.sparse_mean("data", 1/32, "topk_chunks")`',
        adam="top-k of chunks, feedback",
        sgd="top-k of chunks, feedback",
        step="chunks",
    ),
    Take(
        "SGD",
        "each device's momentum by `jaxcomm.local`, then `jaxcomm.majority_vote`",
        sgd="local momentum, vote",
        step="local_momentum_vote",
    ),
)

# What `chain_steps` measures: the optimizer, and what is done.
CHAINS = {
    "adam": ("Adam", "float32 mean, Adam"),
    "factored_adam": ("Adam", "signs in blocks of 128 in factored Nadam"),
    "local_adam": ("Adam", "each device's Nadam, then scaled signs"),
    "local_steps": ("Adam", "4 local steps of Adam, scaled signs, outer momentum"),
    "local_steps_chunks": ("Adam", "4 local steps of Adam, top-k of chunks, outer momentum"),
    "momentum": ("SGD", "float32 mean, SGD with momentum"),
    "chunks": ("SGD", "top-k of chunks, SGD with momentum"),
    "local_momentum": ("SGD", "each device's momentum, then scaled signs"),
    "local_momentum_vote": ("SGD", "each device's momentum, then a vote"),
}
IN_FLOAT32 = {"Adam": "adam", "SGD": "momentum"}

MARKS = (
    ("*", "- \\*: at one learning rate alone; the loss at the best one may be lower."),
    (
        "",
        "- An empty cell was not measured. Rows for SGD lose the given loss before Adam; `cnat` "
        "and `int4` lose before Muon.",
    ),
)


def rows(timed: Timed, rates: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The head and the cells of the table.

    Args:
      timed: method -> rate -> row, of whole steps.
      rates: of the links, in Mbit/s.
    """
    body = []
    gpt, lstm = chosen_losses("gpt"), chosen_losses("lstm_nesterov")
    resnet = chosen_losses("resnet20") | chosen_losses("resnet20_nesterov")
    for row in TAKE:
        losses = gpt.get(row.adam, []), lstm.get(row.sgd, []), resnet.get(row.sgd, [])
        own = losses[row.optimizer == "SGD"]
        sent = statistics.mean(one["bytes_per_step"] for one in own)
        faster = [speed(timed, row, rate) for rate in rates]
        body.append([row.optimizer, row.code, f"{sent:.2f}", *map(worse, losses), *faster])
    head = ["optimizer", "use", "bytes", "GPT, Adam", "LSTM, SGD", "ResNet, SGD"]
    head += [f"speed at {rates[0]} Mbit/s", *(f"at {rate}" for rate in rates[1:])]
    return head, body


def chosen_losses(task: str) -> dict[str, list[dict[str, Any]]]:
    """Method -> runs at its chosen rate, which know how many rates were tried."""
    found: dict[str, list[dict[str, Any]]] = {}
    runs = [run for run in front.read(front.FOLDER) if run["task"] == task]
    for row in runs:
        if row["chosen"] and row["minus_float32"] is not None:
            rates = collections.Counter(
                run["rate"] for run in runs if run["method"] == row["method"]
            )
            tried = sum(seeds == rates[row["rate"]] for seeds in rates.values())  # and compared
            found.setdefault(row["method"], []).append({**row, "tried": tried})
    return found


def worse(runs: list[dict[str, Any]]) -> str:
    """Nats above float32, the mean over seeds; a star where one learning rate was tried."""
    if not runs:
        return ""
    star = "\\*" if runs[0]["tried"] == 1 else ""
    mean = statistics.mean(run["minus_float32"] for run in runs)
    return f"{round(mean, 2) + 0.0:+.2f}{star}"  # not -0.00


def speed(timed: Timed, row: Take, rate: str) -> str:
    """How many steps fit into a float32 step; empty where that was not measured."""
    if row.step:
        ms, float32 = chain_step(rate, row.step)
    else:
        ms = timed[row.link].get(rate, {}).get("step_ms")
        float32 = timed["float32"][rate]["step_ms"]
    return times(float32 / ms) if ms and float32 else ""


def times(factor: float) -> str:
    return f"{factor:.0f}x" if factor >= 10 else f"{factor:.1f}x"


def chain_step(rate: str, chain: str) -> tuple[float | None, float | None]:
    """Milliseconds of a chain's step, and of the same optimizer's in float32 in the same run."""
    parts = json.loads(CHAIN_STEPS.read_text())["parts"] if CHAIN_STEPS.exists() else {}
    for name, part in parts.items():
        found = {step["name"]: step["ms"] for step in part["rows"]}
        if name.partition("/")[0] == rate and chain in found:
            return found[chain], found[in_float32(chain)]
    return None, None


def chains(rates: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the steps of chains, where they were measured at all rates."""
    body = []
    for name, (_, words) in CHAINS.items():
        found = [chain_step(rate, name) for rate in rates]
        cells = [f"{ms:.0f} ({times(float32 / ms)})" for ms, float32 in found if ms and float32]
        if len(cells) == len(rates):
            body.append([words, *cells])
    return ["", f"{rates[0]} Mbit/s", *rates[1:]], body


def in_float32(chain: str) -> str:
    """The chain whose optimizer sees float32 means."""
    return IN_FLOAT32[CHAINS[chain][0]]
