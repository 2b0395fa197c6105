"""What is run: hosts, what is slow about some of them, how the job is steered; and the arguments that say so."""

import argparse
from typing import Any, NamedTuple, Self, TypeVar, get_args

import msgspec
from bench.harness.command import Option, benchmark_parser
from bench.hosts import HostsError, Link
from bench.hosts.services import Probe

from dynamix.schemas.subjects import check_token

NUM_TRAINING_IMAGES = 60_000
Value = TypeVar("Value", str, float)


class Arm(NamedTuple):
    """One way to steer the job: a policy, and the local batch size to begin with."""

    policy: str
    local_batch_size: int

    @classmethod
    def parse(cls, text: str, local_batch_size: int) -> Self:
        """From `POLICY`, or `POLICY:SIZE` for a size of its own.

        Raises:
            ValueError: for a name that cannot be a policy's, and for what is not a size.
        """
        policy, separator, size = text.partition(":")
        chosen = int(size) if separator else local_batch_size
        if chosen < 1:
            raise ValueError(f"local batch size {chosen} of {text!r}: at least 1")
        return cls(check_token(policy), chosen)

    @property
    def label(self) -> str:
        """The text that `parse` reads."""
        return f"{self.policy}:{self.local_batch_size}"


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster and the length of a run on it; ranks are numbered as their hosts."""

    num_hosts: int = 4
    cores: float | None = 0.4
    """Seconds of processor per second that each host has; `None`: no limit."""
    slow_cpus: dict[int, float] = {}
    """The same for single ranks."""
    slow_links: dict[int, str] = {}
    """Rates of single ranks' links, in both directions, as `tc` writes them."""
    queue_limit_bytes: int | None = None
    """Length of the queues in front of slow links; `None`: long enough to lose nothing."""
    num_windows: int = 20
    window_steps: int = 10
    num_warm_up_windows: int = 5
    """Left out of all medians: first steps, and a policy's first decisions."""
    min_local_batch_size: int = 4
    max_local_batch_size: int = 512
    learning_rate: float = 0.02
    probe: Probe = "auto"
    seed: int = 1
    data: str | None = None
    """Directory with Fashion-MNIST's four files; the usual places when not given."""

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be run."""
        if self.num_hosts < 2:
            raise ValueError(f"{self.num_hosts} hosts: a network has at least 2")
        if not 0 <= self.min_local_batch_size <= self.max_local_batch_size:
            raise ValueError(
                f"local batch sizes from {self.min_local_batch_size} to {self.max_local_batch_size}: there are none"
            )
        if not 0 <= self.num_warm_up_windows < self.num_windows:
            raise ValueError(
                f"{self.num_warm_up_windows} of {self.num_windows} windows to warm up leave none to measure"
            )
        for rank in {*self.slow_cpus, *self.slow_links}:
            if not 0 <= rank < self.num_hosts:
                raise ValueError(f"rank {rank} does not exist: {self.num_hosts} hosts have 0 to {self.num_hosts - 1}")
        for rank in self.slow_links:
            self.link_of(rank)

    @property
    def num_steps(self) -> int:
        """Steps of a run."""
        return self.num_windows * self.window_steps

    def link_of(self, rank: int) -> Link | None:
        """The link of a rank's host; `None`: as fast as memory.

        Raises:
            ValueError: for a text that is not a rate.
        """
        if rank not in self.slow_links:
            return None
        limit = {} if self.queue_limit_bytes is None else {"queue_limit_bytes": self.queue_limit_bytes}
        try:
            return Link.parse(self.slow_links[rank], **limit)
        except HostsError as error:
            raise ValueError(str(error)) from error

    def num_epochs(self, arm: Arm) -> int:
        """More passes over the data than the run can need, whatever a policy decides."""
        largest = max(arm.local_batch_size, self.max_local_batch_size)
        return 1 + self.num_steps * largest * self.num_hosts // NUM_TRAINING_IMAGES


DEFAULTS = ClusterPlan()


def cluster_parser(
    name: str, description: str | None, *more: Option, has_figure: bool = False
) -> argparse.ArgumentParser:
    """Parser with the hosts and the length of a run."""
    parser = benchmark_parser(
        *(name, description),
        ("--hosts", DEFAULTS.num_hosts, "number of hosts, one rank on each"),
        ("--cpu", str(DEFAULTS.cores), "cores of each host, or none for no limit"),
        ("--windows", DEFAULTS.num_windows, "of a run"),
        ("--window-steps", DEFAULTS.window_steps, "steps in a window"),
        ("--warm-up", DEFAULTS.num_warm_up_windows, "windows not measured"),
        ("--local-batch-size", 32, "to begin with"),
        ("--smallest", DEFAULTS.min_local_batch_size, "local batch size of a decision"),
        ("--largest", DEFAULTS.max_local_batch_size, "local batch size of a decision"),
        ("--seed", DEFAULTS.seed, "of model and data"),
        *more,
        has_figure=has_figure,
    )
    parser.add_argument(
        "--queue-limit", type=int, metavar="BYTES", help="of slow links; 4500 to 10000 lose thousands of segments"
    )
    parser.add_argument(
        "--probe", choices=get_args(Probe), default=DEFAULTS.probe, help="of the collectors (default: %(default)s)"
    )
    parser.add_argument("--data", metavar="DIR", help="directory with Fashion-MNIST's four idx files")
    return parser


def plan_of(options: argparse.Namespace, **slow: Any) -> ClusterPlan:
    """The plan.

    Raises:
        ValueError: for what cannot be run.
    """
    return ClusterPlan(
        num_hosts=options.hosts,
        cores=None if options.cpu == "none" else float(options.cpu),
        queue_limit_bytes=options.queue_limit,
        num_windows=options.windows,
        window_steps=options.window_steps,
        num_warm_up_windows=options.warm_up,
        min_local_batch_size=options.smallest,
        max_local_batch_size=options.largest,
        probe=options.probe,
        seed=options.seed,
        data=options.data,
        **slow,
    )


def by_rank(pairs: list[str] | None, convert: type[Value]) -> dict[int, Value]:
    """The value of each rank, from pairs `RANK=VALUE`.

    Raises:
        ValueError: for what is not written so.
    """
    values: dict[int, Value] = {}
    for pair in pairs or ():
        rank, separator, value = pair.partition("=")
        if not separator or not rank.isdecimal():
            raise ValueError(f"{pair!r}: write RANK=VALUE, such as 3=20mbit for a link or 3=0.1 for a processor")
        values[int(rank)] = convert(value)
    return values
