"""Scenarios: virtual clusters as files. What each key means stands beside it here, and in scenarios/README.md.

Times are seconds of the virtual clock, rates and bandwidths are per second of it.
"""

import tomllib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Self

import msgspec

from dynamix.schemas.messages import NodeRanks
from dynamix.schemas.messages.fields import MAX_RANKS
from dynamix.schemas.subjects import check_token
from dynamix.trainer.gradient.learning_rate import Rule

from .checks import check_between, check_positive, explain_decode_error

BYTES_PER_MBIT = 1e6 / 8
NODE_NAME = "virtual-{}"


class ScenarioTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a scenario file: an unknown key is an error."""


class Network(ScenarioTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How gradients are reduced, and over what; `dynamix.lab.simulator.clock` has the formulas."""

    topology: Literal["ring", "parameter-server"] = "ring"
    bandwidth_mbit_s: float = 10_000.0
    """Bandwidth of each parameter server, and of each worker whose table has none."""
    latency_s: float = 5e-5
    """One way, of one message."""
    overlap: float = 0.5
    """Share of the slowest worker's compute time beside which gradients already travel, 0 ... 1."""
    num_buckets: int = 4
    """Buckets a gradient travels in: the last one is ready when computing ends, and never hidden."""
    num_servers: int = 1
    """Parameter servers; each holds an equal part of the gradient."""
    gradient_bytes: int = 0
    """Bytes of one gradient; 0: those of the model. More pretends a larger model."""

    def __post_init__(self) -> None:
        check_positive("network.bandwidth_mbit_s", self.bandwidth_mbit_s)
        check_between("network.latency_s", self.latency_s, 0)
        check_between("network.overlap", self.overlap, 0, 1)
        check_between("network.num_buckets", self.num_buckets, 1)
        check_between("network.num_servers", self.num_servers, 1)
        check_between("network.gradient_bytes", self.gradient_bytes, 0)


class Workers(ScenarioTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some workers that are alike."""

    samples_per_s: float
    """Undisturbed, at any batch size."""
    count: int = 1
    overhead_s: float = 0.0
    """Compute time of a step that does not depend on the batch size."""
    max_local_batch_size: int | None = None
    """What its memory holds; without it the scenario's upper bound."""
    bandwidth_mbit_s: float | None = None
    """Bandwidth of its own link; `None`: the network's."""

    def __post_init__(self) -> None:
        check_between("workers.count", self.count, 1, MAX_RANKS)
        check_positive("workers.samples_per_s", self.samples_per_s)
        check_between("workers.overhead_s", self.overhead_s, 0)
        if self.bandwidth_mbit_s is not None:
            check_positive("workers.bandwidth_mbit_s", self.bandwidth_mbit_s)


class Stragglers(ScenarioTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that slow down and recover, each by its own two-state Markov process in virtual time."""

    factor: float = 1.0
    """Time per sample while slow, over that while normal."""
    mean_normal_s: float = 60.0
    mean_slow_s: float = 10.0
    jitter: float = 0.0
    """Sigma of a lognormal factor of median 1 on the time per sample of every step."""

    def __post_init__(self) -> None:
        check_between("stragglers.factor", self.factor, 1)
        check_positive("stragglers.mean_normal_s", self.mean_normal_s)
        check_positive("stragglers.mean_slow_s", self.mean_slow_s)
        check_between("stragglers.jitter", self.jitter, 0, 2)


class Congestion(ScenarioTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A network that congests and clears by a two-state Markov process in virtual time."""

    factor: float = 1.0
    """Bandwidth while clear, over that while congested; round trip times grow by as much."""
    mean_clear_s: float = 60.0
    mean_congested_s: float = 10.0
    retransmits_per_s: float = 0.0
    """Segments that each worker behind a congested link retransmits, per second."""
    shared: bool = True
    """One state for the whole network, or one for each worker's link."""

    def __post_init__(self) -> None:
        check_between("congestion.factor", self.factor, 1)
        check_positive("congestion.mean_clear_s", self.mean_clear_s)
        check_positive("congestion.mean_congested_s", self.mean_congested_s)
        check_between("congestion.retransmits_per_s", self.retransmits_per_s, 0)


class DecisionCost(ScenarioTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a decision costs the step at which it begins to rule: cost_s + cost_per_doubling_s * log2 N."""

    cost_s: float = 0.001
    cost_per_doubling_s: float = 0.0001

    def __post_init__(self) -> None:
        check_between("decision.cost_s", self.cost_s, 0)
        check_between("decision.cost_per_doubling_s", self.cost_per_doubling_s, 0)


TABLES: Mapping[str, type[ScenarioTable]] = MappingProxyType(
    {
        "network": Network,
        "workers": Workers,
        "stragglers": Stragglers,
        "congestion": Congestion,
        "decision": DecisionCost,
    }
)
"""The tables of a scenario by their names."""


class Scenario(ScenarioTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One virtual cluster with its training job, and when that is over."""

    family: str
    """Scenarios of one family are reported together."""
    workload: str
    """See `dynamix.lab.workloads`."""
    workers: tuple[Workers, ...]
    target_accuracy: float
    """Validation accuracy, 0 ... 1."""
    fixed_time_s: float
    """The accuracy is compared at this time; no run ends before, but at `time_limit_s`."""
    time_limit_s: float
    """A run that has not reached the target by then has missed it."""
    name: str = ""
    """Within its directory; the file's name when not given."""
    learn: bool = True
    """Whether policies may learn from it; if not, it serves to choose settings."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: float = 0.05
    learning_rate_rule: Rule = "sqrt"
    base_global_batch_size: int = 512
    """The global batch size that `learning_rate` was chosen for."""
    weight_decay: float = 0.0
    label_noise: float = 0.0
    """Share of the training labels that are replaced by another class, drawn once per seed."""
    num_train_samples: int = 0
    """The first so many of the training part; 0: all."""
    window_steps: int = 10
    """k: steps between two decisions."""
    lag_windows: int = 1
    """The action of window t rules from window t + 1 + lag_windows on."""
    initial_local_batch_size: int = 64
    min_local_batch_size: int = 8
    max_local_batch_size: int = 1024
    ranks_per_node: int = 8
    noise_every: int = 1
    """Steps between two measurements of the gradient noise."""
    evaluate_every_s: float = 1.0
    """Grid of virtual time on which the validation accuracy is taken."""
    evaluation_samples: int = 0
    """The first so many of the validation part; 0: all."""
    network: Network = Network()
    stragglers: Stragglers | None = None
    congestion: Congestion | None = None
    decision: DecisionCost = DecisionCost()

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot work, naming key, value and limit."""
        check_token(self.family)
        if self.name:
            check_token(self.name)
        if not self.workers:
            raise ValueError("no workers: add a table [[workers]]")
        self._check_training()
        self._check_sizes()
        check_positive("evaluate_every_s", self.evaluate_every_s)
        check_between("target_accuracy", self.target_accuracy, 0, 1)
        check_positive("time_limit_s", self.time_limit_s)
        check_between("fixed_time_s", self.fixed_time_s, 0, self.time_limit_s)

    def _check_training(self) -> None:
        check_positive("learning_rate", self.learning_rate)
        check_between("weight_decay", self.weight_decay, 0)
        check_between("label_noise", self.label_noise, 0, 1)
        for key in ("num_train_samples", "evaluation_samples"):
            check_between(key, getattr(self, key), 0)
        for key in ("base_global_batch_size", "window_steps", "ranks_per_node", "noise_every"):
            check_between(key, getattr(self, key), 1)
        check_between("lag_windows", self.lag_windows, 0, 16)

    def _check_sizes(self) -> None:
        check_between("world size", self.world_size, 1, MAX_RANKS)
        check_between("min_local_batch_size", self.min_local_batch_size, 0, self.max_local_batch_size)
        check_between("max_local_batch_size", self.max_local_batch_size, 1)
        check_between(
            "initial_local_batch_size",
            self.initial_local_batch_size,
            max(1, self.min_local_batch_size),
            self.max_local_batch_size,
        )
        for group in self.workers:
            if group.max_local_batch_size is not None:
                check_between(
                    "workers.max_local_batch_size", group.max_local_batch_size, max(1, self.min_local_batch_size)
                )

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The scenario in a TOML file.

        Raises:
            ValueError: when it is no scenario; the text names file, key and value.
            OSError: when the file cannot be read.
        """
        file = Path(path)
        try:
            content = tomllib.loads(file.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: this is not TOML: {error}") from error
        try:
            return msgspec.convert({"name": file.stem, **content}, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"{file}: {explain_decode_error(str(error), content, {'': cls, **TABLES})}") from error

    @property
    def world_size(self) -> int:
        """N: workers of all groups."""
        return sum(group.count for group in self.workers)

    @property
    def per_worker(self) -> tuple[Workers, ...]:
        """The table of each worker, in rank order."""
        return tuple(group for group in self.workers for _ in range(group.count))

    @property
    def max_local_batch_sizes(self) -> tuple[int, ...]:
        """Upper bound of each worker: the scenario's, or what its memory holds."""
        most = self.max_local_batch_size
        return tuple(min(most, group.max_local_batch_size or most) for group in self.per_worker)

    def local_batch_sizes(self, local_batch_size: int | None = None) -> tuple[int, ...]:
        """The same size for each worker, or as much as its memory holds; by default the scenario's initial size.

        Raises:
            ValueError: when the size is outside the scenario's bounds.
        """
        size = self.initial_local_batch_size if local_batch_size is None else local_batch_size
        check_between("local_batch_size", size, max(1, self.min_local_batch_size), self.max_local_batch_size)
        return tuple(min(size, most) for most in self.max_local_batch_sizes)

    @property
    def nodes(self) -> tuple[NodeRanks, ...]:
        """The nodes: `ranks_per_node` ranks each, in rank order, the last one what is left."""
        each, total = self.ranks_per_node, self.world_size
        starts = range(0, total, each)
        return tuple(
            NodeRanks(node=NODE_NAME.format(number), ranks=tuple(range(start, min(start + each, total))))
            for number, start in enumerate(starts)
        )


def scenarios_in(directory: str | Path) -> list[Scenario]:
    """The scenarios of a directory's .toml files, sorted by name.

    Raises:
        ValueError: when there is none, two have one name, or a file is no scenario.
        OSError: when a file cannot be read.
    """
    files = sorted(Path(directory).glob("*.toml"))
    if not files:
        raise ValueError(f"{directory} holds no scenario: a directory with .toml files is needed (scenarios/README.md)")
    found = sorted((Scenario.read(file) for file in files), key=lambda scenario: scenario.name)
    for first, second in pairwise(found):
        if first.name == second.name:
            raise ValueError(f"{directory} holds two scenarios of the name {first.name!r}: names tell runs apart")
    return found
