"""What the planner chooses from: each method, what it needs, and how to make it.

A method is a family (a codec, votes, a sparse all-reduce, a low rank) and an algorithm.
"""

import dataclasses
from typing import Any

from jaxcomm import transforms
from jaxcomm._numbers import is_integer
from jaxcomm.collectives import algorithms, sparse
from jaxcomm.collectives.algorithms import Algorithm, _default
from jaxcomm.plan.costs import BY_HOSTS, MERGING

# Each contains those before it.
QUALITIES = ("exact", "16bit", "unbiased", "any")
QUALITY = "16bit"  # The default: no measurement tells these from float32.
OPTIMIZERS = ("sgd", "adam", "muon")
NOT_BEFORE_MUON = ("sgd", "adam")  # of what lost accuracy there
DENSITY = 0.01
# Arguments of the algorithm, by name: of halving_doubling, or hierarchical's devices_per_host.
Dimensions = tuple[tuple[str, Any], ...]
FEEDBACK = "error feedback"
FEW_BITS = f"{FEEDBACK} after jaxcomm.local of the optimizer, or factored_adam"
RARELY = {"scaled_sign": 4}  # families that `methods` has in every so many steps too
LOCAL_STEPS = "jaxcomm.local_steps, its rates and outer momentum"


@dataclasses.dataclass(frozen=True)
class Family:
    """Methods that send the same values.

    Attributes:
      quality: "exact": the float32 mean, up to the order of additions; "16bit": a mean whose
        messages are rounded to 16 bits; "unbiased": rounding at random, right on average; "any":
        all others.
      needs: what it needs in order to train like float32.
      options: fields of `config.sync` in the training program, without the algorithm.
      bucket_mib: the size of the float32 gradients that travel together, in MiB.
      algorithms: the names of the algorithms that can carry it out.
      optimizers: those of OPTIMIZERS with which it trained well, given its needs.
    """

    quality: str
    needs: str
    options: dict[str, Any]
    bucket_mib: float
    algorithms: tuple[str, ...]
    optimizers: tuple[str, ...] = OPTIMIZERS


SCHEDULED = ("direct", "two_way_ring", "ring", "halving_doubling", "circulant")
BOTH_LEVELS = (*SCHEDULED, "hierarchical")
MERGED = BOTH_LEVELS[1:]  # partial sums are encoded again on the way


def ending_of(algorithm: str, is_by_hosts: bool) -> str:
    """The end of the names in `Costs.local` of what goes by this algorithm."""
    if is_by_hosts:
        return BY_HOSTS
    return MERGING if algorithm in MERGED else ""


def _mean(
    codec: str, quality: str, needs: str = "", optimizers: tuple[str, ...] = OPTIMIZERS
) -> Family:
    options: dict[str, Any] = {"method": "mean", "codec": codec}
    if FEEDBACK in needs:
        options["error_feedback"] = True
    if needs == FEW_BITS:
        options["local_optimizer"] = True
    native = ("native",) if codec == "float32" else ()
    return Family(quality, needs, options, 8.0, (*native, *BOTH_LEVELS), optimizers)


def density_of(name: str) -> float:
    """The density of a sparse all-reduce: more where entries are short and each chunk has some."""
    return 1 / 32 if name == "topk_chunks" else DENSITY


def _sparse(name: str) -> Family:
    options = {"method": "sparse_mean", "density": density_of(name), "algorithm": name}
    return Family("any", "SGD; dense_steps at the start", options, 32.0, ("own",), ("sgd",))


def _low_rank(rank: int) -> Family:
    options = {"method": "low_rank_mean", "rank": rank}
    needs = "SGD; matrices; dense_steps at the start"
    return Family("any", needs, options, 32.0, ("native",), ("sgd",))


FAMILIES: dict[str, Family] = {  # among equals, the first ones are preferred
    "float32": _mean("float32", "exact"),
    "bfloat16": _mean("bfloat16", "16bit"),
    "float16": _mean("float16", "16bit"),
    "cnat": _mean("cnat", "unbiased", "", NOT_BEFORE_MUON),
    "int8": _mean("int8", "any"),
    "fp8_e4m3": _mean("fp8_e4m3", "any"),
    "int4": _mean("int4", "any", FEEDBACK, NOT_BEFORE_MUON),
    "int2": _mean("int2", "any", FEW_BITS),
    "scaled_sign": _mean("scaled_sign", "any", FEW_BITS),
    **{f"powersgd{rank}": _low_rank(rank) for rank in (4, 2, 1)},
    "vote": Family(
        "any",
        "SGD; jaxcomm.local momentum; a rate of its own; devices' data alike",
        {"method": "majority_vote", "local_optimizer": True},
        16.0,
        BOTH_LEVELS,
        ("sgd",),
    ),
    # First that which loses least for its bytes.
    **{name: _sparse(name) for name in ("topk_chunks", *sparse.BY_NAME)},
}


@dataclasses.dataclass(frozen=True)
class Method:
    """A family carried out by an algorithm.

    Attributes:
      family: such as "bfloat16" or "vote"; `jaxcomm.plan.methods()` lists all.
      algorithm: a name in `jaxcomm.algorithms`, "hierarchical", or "own" for sparse ones.
      dimensions: arguments of the algorithm: those of `jaxcomm.algorithms.halving_doubling`, or the
        devices_per_host of "hierarchical", which then goes along one axis.
      every: the number of steps that devices take by themselves from one exchange to the next, as
        with `jaxcomm.local_steps`; 1 exchanges gradients in every step.

    Raises:
      ValueError: for an unknown family, an algorithm that cannot carry it out, or votes between
        local steps.
    """

    family: str
    algorithm: str
    dimensions: Dimensions = ()
    every: int = 1

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"unknown family {self.family!r}; write one of {', '.join(FAMILIES)}.")
        if self.algorithm not in self.about.algorithms:
            known = " or ".join(repr(name) for name in self.about.algorithms)
            raise ValueError(
                f"{self.family} goes by {known}, got the algorithm {self.algorithm!r}."
            )
        if not is_integer(self.every) or self.every < 1:
            raise ValueError(f"every is 1, 2, ... steps, got {self.every!r}.")
        if self.every > 1 and self.family == "vote":
            raise ValueError("local_steps exchanges means, and a vote is none; write every=1.")

    @property
    def name(self) -> str:
        """Such as bfloat16/ring, or bfloat16/ring/every32; a sparse method has no algorithm."""
        algorithm = [] if self.algorithm == "own" else [self.algorithm]
        rarely = [f"every{self.every}"] if self.every > 1 else []
        return "/".join(
            [self.family, *algorithm, *(str(v) for _, v in self.dimensions[:1]), *rarely]
        )

    @property
    def about(self) -> Family:
        """What it shares with its family."""
        return FAMILIES[self.family]

    @property
    def quality(self) -> str:
        """That of its family, in every step."""
        return self.about.quality if self.every == 1 else QUALITIES[-1]

    @property
    def needs(self) -> str:
        """What it needs in order to train like float32."""
        if self.every == 1:
            return self.about.needs
        if self.about.optimizers == ("sgd",):
            return f"{self.about.needs}; {LOCAL_STEPS}"
        own = [FEEDBACK] if FEEDBACK in self.about.needs else []
        return "; ".join([*own, LOCAL_STEPS, "with Adam or Muon, devices' data alike"])

    @property
    def is_by_hosts(self) -> bool:
        """Whether devices of a host, which follow each other along the axis, add up first."""
        return self.algorithm == "hierarchical" and bool(self.dimensions)

    def is_usual(
        self, devices: int, between_cpus: bool, values: int | None = None, per_host: int = 1
    ) -> bool:
        """Whether its algorithm is what None stands for (`_default.usual`)."""
        if "direct" not in self.about.algorithms or self.family == "float32":
            return self.algorithm == self.about.algorithms[0]
        usual = _default.usual(self._sent_as, devices, between_cpus, values, per_host)
        return self.algorithm == usual.name and (self.is_by_hosts or usual.name != "hierarchical")

    @property
    def _sent_as(self) -> str:
        return "votes" if self.family == "vote" else _default.sent_as({self.family})

    @property
    def config(self) -> dict[str, Any]:
        """The fields of `config.sync` in the training program that make it."""
        options = dict(self.about.options)
        # By hosts is what no algorithm stands for, but in float32, and a low rank has none.
        if self.algorithm not in ("own", "hierarchical") and options["method"] != "low_rank_mean":
            arguments = ", ".join(f"{name}={value!r}" for name, value in self.dimensions)
            options["algorithm"] = self.algorithm + (f"({arguments})" if arguments else "")
        if self.every > 1:  # each device then has its own optimizer
            options.pop("local_optimizer", None)
            options["every"] = int(self.every)
        return options

    def made(self, world: int, between_cpus: bool, values: int | None = None) -> Algorithm:
        """The algorithm, for so many devices and values; only for means and votes."""
        if self.is_by_hosts and self.family == "float32":  # None stands for XLA's own mean
            direct = algorithms.direct()
            return algorithms.hierarchical(near=direct, far=direct, **dict(self.dimensions))
        if self.is_by_hosts:
            ((_, per_host),) = self.dimensions
            return _default.usual(self._sent_as, world, between_cpus, values, per_host)
        if self.algorithm == "hierarchical":
            return hierarchical()
        chosen = algorithms.BY_NAME[self.algorithm](**dict(self.dimensions))
        return chosen if self.family == "vote" else chosen.for_means

    def transformation(self, axis_name: Any, **options: Any) -> Any:
        """The exchange alone; what it needs around it is up to the caller.

        Args:
          axis_name: the mesh axis; (far, near) for hierarchical, unless it is by hosts.
          **options: arguments of the factory, such as `exempt`.
        """
        chosen = {**self.config, **options}
        for field in "local_optimizer", "every":
            chosen.pop(field, None)
        factory = getattr(transforms, chosen.pop("method"))
        is_default = self.is_by_hosts and self.family != "float32"
        if not is_default and (self.algorithm == "hierarchical" or self.dimensions):
            chosen["algorithm"] = self.made(1, False)  # the same for any number of devices
        return factory(axis_name, **chosen)


def hierarchical() -> Algorithm:
    """The algorithm that the planner uses on two levels of switches."""
    return algorithms.hierarchical(near=algorithms.ring(), far=algorithms.ring())


def methods(
    quality: str = "any",
    two_levels: bool = False,
    dimensions: Dimensions = (),
    optimizer: str | None = None,
    per_host: int = 1,
) -> list[Method]:
    """All methods of at least this quality; of those with local steps, scaled signs in every 4th.

    Args:
      quality: "exact", "16bit", "unbiased" or "any".
      two_levels: whether the network has two levels.
      dimensions: the arguments of halving-doubling.
      optimizer: "sgd", "adam" or "muon", to leave out methods that lost accuracy with it; None
        leaves out none.
      per_host: the devices of each host, if they follow each other; the two levels are then those.

    Returns:
      The methods, for the `chosen` of `jaxcomm.plan.plan`.

    Raises:
      ValueError: for another quality or optimizer.
    """
    if quality not in QUALITIES:
        raise ValueError(f"unknown quality {quality!r}; write one of {', '.join(QUALITIES)}.")
    check_optimizer(optimizer)
    allowed = QUALITIES[: QUALITIES.index(quality) + 1]
    arguments = {"halving_doubling": dimensions}
    if per_host > 1:
        arguments["hierarchical"] = (("devices_per_host", per_host),)
    in_every_step = [
        Method(family, algorithm, arguments.get(algorithm, ()))
        for family, about in FAMILIES.items()
        if about.quality in allowed and (optimizer is None or optimizer in about.optimizers)
        for algorithm in about.algorithms
        if two_levels or algorithm != "hierarchical"
    ]
    rarely = [
        dataclasses.replace(method, every=RARELY[method.family])
        for method in in_every_step
        if method.family in RARELY
    ]
    return [*in_every_step, *rarely]


def check_optimizer(optimizer: str | None) -> None:
    """Raises for anything but None and OPTIMIZERS."""
    if optimizer not in (None, *OPTIMIZERS):
        known = ", ".join(map(repr, OPTIMIZERS))
        raise ValueError(f"optimizer is one of {known}, got {optimizer!r}.")
