"""Scenarios: virtual clusters as files. Each key stands here with its meaning (docs/scenario-keys.md on the site).

Times are seconds of the virtual clock, rates and bandwidths are per second of it.
"""

import hashlib
import math
import tomllib
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec
from msgspec import Meta

from dynamix.runtime.input_files import read_regular
from dynamix.schemas.messages import NodeRanks, OptimizerFamily
from dynamix.schemas.messages.allocation import EXCHANGE_CODECS, MAX_RANKS, ExchangePermission
from dynamix.schemas.subjects import check_token
from dynamix.trainer.gradient.learning_rate import Rule

FINITE = 1e308
NotNegative = Annotated[float, Meta(ge=0, le=FINITE)]
Positive = Annotated[float, Meta(gt=0, le=FINITE)]
Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(ge=1, le=FINITE)]
WholeNumber = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]


def check_between(key: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise ValueError if the value is out of range; `key` names it in the message."""
    if not low <= value <= high:
        limit = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ValueError(f"{key} = {value:g}: it must be {limit}")


BYTES_PER_MBIT = 1e6 / 8
MAX_EVALUATIONS = 1_000_000
"""Most evaluations of a run, which are all stored."""
NODE_NAME = "virtual-{}"


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network and its topology; `dynamix.lab.simulator.clock` has the formulas."""

    topology: Literal["ring", "parameter-server"] = "ring"
    bandwidth_mbit_s: Positive = 10_000.0
    """Bandwidth of each parameter server, and of each worker whose table has none."""
    latency_s: NotNegative = 5e-5
    """One way, of one message: a ring pays 2 (N - 1) for each bucket."""
    overlap: Share = 0.5
    """Share of the slowest worker's compute time during which gradients are already sent, 0 ... 1."""
    num_buckets: AtLeastOne = 4
    """Buckets of a gradient: the last one is ready when computing ends, and never hidden."""
    num_servers: AtLeastOne = 1
    """Parameter servers; each holds an equal part of the gradient."""
    gradient_bytes: WholeNumber = 0
    """Bytes of one gradient; 0: those of the model. More pretends a larger model."""
    by_node: bool = False
    """Whether the workers of a node share one link, and sum gradients first, in no time: one exchange per node."""


class Workers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some workers that are alike."""

    samples_per_s: Positive
    """Undisturbed, at any batch size above `saturation`."""
    count: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    overhead_s: NotNegative = 0.0
    """Compute time of a step that does not depend on the batch size."""
    saturation: WholeNumber = 0
    """Samples below which a batch costs no less, such as of a GPU that waits for its kernels to be launched."""
    max_local_batch_size: AtLeastOne | None = None
    """Samples that its memory holds; without it the scenario's upper bound."""
    bandwidth_mbit_s: Positive | None = None
    """Bandwidth of its own link; `None`: the network's."""
    cores: Positive = 1.0
    """Processor that its host grants an exchange: coding takes 1 / cores as long. Computing is `samples_per_s`."""
    quota_period_s: NotNegative = 0.0
    """Period of a quota that grants it less than 1: computing uses the share up, the exchange waits for the next."""


class Stragglers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that slow down and recover, each by its own two-state Markov process in virtual time."""

    factor: Factor = 1.0
    """Compute time while slow, the overhead included, over that while normal."""
    mean_normal_s: Positive = 60.0
    mean_slow_s: Positive = 10.0
    jitter: Annotated[float, Meta(ge=0, le=2)] = 0.0
    """Sigma of a lognormal factor of median 1 on the compute time of every step."""


class Congestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A network that congests and clears by a two-state Markov process in virtual time."""

    factor: Factor = 1.0
    """Bandwidth while clear, over that while congested; latency and round trip times grow by as much."""
    mean_clear_s: Positive = 60.0
    mean_congested_s: Positive = 10.0
    retransmits_per_s: NotNegative = 0.0
    """Segments that each worker behind a congested link retransmits, per second."""
    shared: bool = True
    """One state for the whole network, or one for each worker's link."""


class Coding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of coding and decoding a gradient on an undisturbed rank, in seconds per million bytes of it.

    Per byte the defaults are CPU times of one core (2026), of buckets of 1 and 4 MB over 4 and 8 ranks; for `rows` with
    5 % of the rows, drawn by each rank. Per message and bucket they are what else a round of local steps took on real
    clocks: four gloo ranks of 0.4 core, 0.4 MB, `int8`.
    """

    none: NotNegative = 0.0006
    """Under the route `shares`, where owners sum; an all-reduce costs none."""
    bf16: NotNegative = 0.0012
    fp16: NotNegative = 0.0011
    int8: NotNegative = 0.0016
    rows: NotNegative = 0.0007
    message_s: NotNegative = 1e-4
    """For each message to and from another rank, whatever its size: what matters with small buckets and many ranks."""
    bucket_s: NotNegative = 1e-3
    """For each bucket: hand-over between threads, and operations on caches that training has filled."""

    def s_per_byte(self, codec: str) -> float:
        """Seconds that a codec takes for each byte of the gradient.

        Raises:
            ValueError: for a codec of an extension, whose cost is not known.
        """
        if codec not in EXCHANGE_CODECS:
            raise ValueError(f"codec {codec}: virtual clusters know the cost of {', '.join(EXCHANGE_CODECS)}")
        return float(getattr(self, codec)) / 1e6


class DecisionCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of another allocation in its first step: cost_s + cost_per_doubling_s * log2 N.

    A decision that leaves the allocation as it is costs nothing, nor does a new split by the fast loop.
    """

    cost_s: NotNegative = 0.001
    cost_per_doubling_s: NotNegative = 0.0001


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One virtual cluster with its training job, and when that is over."""

    family: str
    """Scenarios of one family are reported together."""
    workload: str
    """See `dynamix.lab.workloads`."""
    workers: tuple[Workers, ...]
    target_accuracy: Share
    """Validation accuracy, 0 ... 1."""
    fixed_time_s: float
    """The accuracy is compared at this time; no run ends before, but at `time_limit_s`."""
    time_limit_s: Positive
    """A run that has not reached the target by then has missed it."""
    name: str = ""
    """Within its directory; the file's name when not given."""
    learn: bool = True
    """Whether policies may learn from it; if not, it serves to choose settings."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: Positive = 0.05
    learning_rate_rule: Rule = "sqrt"
    base_global_batch_size: AtLeastOne = 512
    """The global batch size that `learning_rate` was chosen for."""
    weight_decay: NotNegative = 0.0
    label_noise: Share = 0.0
    """Share of the training labels that are replaced by another class, drawn once per seed."""
    num_train_samples: WholeNumber = 0
    """The first so many of the training part; 0: all."""
    window_steps: AtLeastOne = 10
    """k: steps between two decisions."""
    lag_windows: Annotated[int, Meta(ge=0, le=16)] = 1
    """The action of window t applies from window t + 1 + lag_windows on."""
    initial_local_batch_size: int = 64
    min_local_batch_size: int = 1
    max_local_batch_size: AtLeastOne = 1024
    ranks_per_node: AtLeastOne = 8
    noise_every: AtLeastOne = 1
    """Steps between two measurements of the gradient noise."""
    evaluate_every_s: Positive = 1.0
    """Grid of virtual time on which the validation accuracy is taken."""
    evaluation_samples: WholeNumber = 0
    """The first so many of the validation part; 0: all."""
    network: Network = Network()
    stragglers: Stragglers | None = None
    congestion: Congestion | None = None
    decision: DecisionCost = DecisionCost()
    exchange: ExchangePermission = "exact"
    """Permission of decisions for codecs and local steps, as in `attach`."""
    coding: Coding = Coding()

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot work, naming key, value and limit."""
        check_token(self.family)
        if self.name:
            check_token(self.name)
        if not self.workers:
            raise ValueError("no workers: add a table [[workers]]")
        check_between("world size", self.world_size, 1, MAX_RANKS)
        check_between("fixed_time_s", self.fixed_time_s, 0, self.time_limit_s)
        check_between("evaluate_every_s", self.evaluate_every_s, self.time_limit_s / MAX_EVALUATIONS)
        least = max(1, self.min_local_batch_size)
        check_between("min_local_batch_size", self.min_local_batch_size, 0, self.max_local_batch_size)
        check_between("initial_local_batch_size", self.initial_local_batch_size, least, self.max_local_batch_size)
        if self.exchange != "exact" and self.network.topology != "ring":
            raise ValueError(
                f'exchange = "{self.exchange}": parameter servers support neither codecs nor local steps; use '
                'network.topology = "ring"'
            )
        if self.network.by_node and (self.network.topology != "ring" or self.world_size % self.ranks_per_node):
            raise ValueError(
                'network.by_node needs a ring of nodes with equally many workers: use topology = "ring" and a '
                f"ranks_per_node that divides {self.world_size}"
            )
        if self.exchange != "exact" and self.lag_windows < 1:
            raise ValueError(
                f'lag_windows = {self.lag_windows}: with exchange = "{self.exchange}" the last step before a change of '
                "codec sends the residuals, so the change must be known by then: use at least 1"
            )
        for group in self.workers:
            if group.max_local_batch_size is not None:
                check_between("workers.max_local_batch_size", group.max_local_batch_size, least)

    @property
    def optimizer_family(self) -> OptimizerFamily:
        """The family in the formulas of rewards."""
        return "sgd" if self.optimizer == "sgd" else "adam"

    @property
    def supports_exchange(self) -> bool:
        """Whether the workers support codecs and local steps."""
        return self.network.topology == "ring"

    @property
    def permits_any_exchange(self) -> bool:
        """Whether the scenario stays valid under every permission of exchanges."""
        return self.supports_exchange and self.lag_windows >= 1

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The scenario in a TOML file.

        Raises:
            ValueError: when it is not a scenario; the message names file, key and value.
            OSError: when the file cannot be read.
        """
        file = Path(path)
        try:
            return msgspec.convert({"name": file.stem, **tomllib.loads(read_regular(file).decode())}, cls)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: not TOML: {error}") from error
        except (msgspec.ValidationError, RecursionError) as error:
            raise ValueError(f"{file}: not a scenario: {error}") from error

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
    def num_together(self) -> int:
        """Workers that sum gradients before they exchange them."""
        return self.ranks_per_node if self.network.by_node else 1

    @property
    def nodes(self) -> tuple[NodeRanks, ...]:
        """The nodes: `ranks_per_node` ranks each, in rank order, the last one what is left."""
        each, total = self.ranks_per_node, self.world_size
        starts = range(0, total, each)
        return tuple(
            NodeRanks(node=NODE_NAME.format(number), ranks=tuple(range(start, min(start + each, total))))
            for number, start in enumerate(starts)
        )


TRAIN = "train"
HELD_OUT = "heldout"
SUITES = (HELD_OUT, TRAIN, *(f"{group}/{part}" for group in ("varying", "published") for part in (HELD_OUT, TRAIN)))
"""`varying`: conditions that change faster than windows. `published`: the bounds of the published method."""
TUNED_FILE = "tuned.toml"
TUNED_EXCHANGE_FILE = "tuned-exchange.toml"


class Suite(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Scenarios that are evaluated together."""

    name: str
    scenarios: tuple[Scenario, ...]

    @cached_property
    def families(self) -> dict[str, tuple[Scenario, ...]]:
        """The scenarios of each family, families in alphabetical order."""
        names = sorted({scenario.family for scenario in self.scenarios})
        return {name: tuple(found for found in self.scenarios if found.family == name) for name in names}

    @property
    def heterogeneous_families(self) -> list[str]:
        """Names of the families that are not a control."""
        return [name for name, scenarios in self.families.items() if not is_control(scenarios)]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the content of all its scenarios."""
        return hashlib.sha256("".join(sorted(map(digest_of, self.scenarios))).encode()).hexdigest()


def digest_of(scenario: Scenario) -> str:
    """Return the SHA-256 of a scenario's content; comments and the order of keys do not change it."""
    return hashlib.sha256(msgspec.json.encode(scenario, order="sorted")).hexdigest()


def is_control(scenarios: Sequence[Scenario]) -> bool:
    """Whether a family is the control: its workers are alike and stay alike, so no controller can gain."""
    kinds = [{msgspec.structs.replace(group, count=1) for group in scenario.workers} for scenario in scenarios]
    disturbances = [each for scenario in scenarios for each in (scenario.stragglers, scenario.congestion)]
    return all(len(each) == 1 for each in kinds) and all(each is None or each.factor == 1.0 for each in disturbances)


def scenario_root() -> Path:
    """Directory of the scenarios of the package, or of this checkout. Raises ValueError when neither is there."""
    here = Path(__file__).resolve()
    places = (here.parents[1] / "scenarios", here.parents[4] / "scenarios")
    for place in places:
        if place.is_dir():
            return place
    raise ValueError(f"no scenarios in {places[0]} nor {places[1]}: name a directory with --scenarios DIR")


def suite_named(name: str) -> Suite:
    """One of the suites that come with the package (`SUITES`), or the scenarios of a directory.

    Raises ValueError and OSError as `read_suite`.
    """
    return read_suite(scenario_root() / name, name) if name in SUITES else read_suite(Path(name))


def read_suite(directory: Path, name: str | None = None) -> Suite:
    """The scenarios of a directory's *.toml files, sorted by name.

    Raises:
        ValueError: when there is none, two have one name, or a file is not a scenario; the message names the file.
        OSError: when a file cannot be read.
    """
    found = sorted(map(Scenario.read, sorted(directory.glob("*.toml"))), key=lambda scenario: scenario.name)
    if not found:
        raise ValueError(f"{directory} holds no scenario: a directory with .toml files is needed (scenarios/README.md)")
    for first, second in pairwise(found):
        if first.name == second.name:
            raise ValueError(f"{directory} holds two scenarios of the name {first.name!r}: names tell runs apart")
    return Suite(name=name or directory.resolve().name, scenarios=tuple(found))
