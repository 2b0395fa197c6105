"""What is measured: workloads, batches and links, each with all arms; and the arguments that say so."""

import argparse
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
from bench.exchange.plan import (
    BASELINES,
    MAX_RANKS,
    SERVERS_OPTION,
    LinkedCase,
    at_least,
    check_arms,
    check_links,
    numbers,
)
from bench.harness.command import benchmark_parser

from dynamix.lab.workloads import workload_named

DEFAULT_ARMS = (*BASELINES, "rows", "sketch", "int8")


class StepsCase(LinkedCase, frozen=True, kw_only=True):
    """One workload on one network."""

    workload: str
    local_batch_size: int


class StepsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank does with a case."""

    arms: tuple[str, ...]
    num_rounds: int
    num_steps: int
    """Steps of an arm in a round."""
    learning_rate: float
    seed: int
    data: str | None


class TrainingPlan(NamedTuple):
    """Everything that is measured."""

    rank: StepsPlan
    ranks: tuple[int, ...]
    links: tuple[str, ...]
    workloads: tuple[str, ...]
    sizes: tuple[int, ...]
    servers: tuple[int, ...]

    def cases(self) -> Iterator[StepsCase]:
        """All, one workload after the other."""
        for num_ranks, num_servers, workload, size, link in itertools.product(
            self.ranks, self.servers, self.workloads, self.sizes, self.links
        ):
            yield StepsCase(
                num_ranks=num_ranks, num_servers=num_servers, link=link, workload=workload, local_batch_size=size
            )


def steps_parser(description: str | None) -> argparse.ArgumentParser:
    """Parser with the cases; lists are written with commas."""
    parser = benchmark_parser(
        *("exchange.steps", description),
        ("--ranks", "4", "numbers of ranks, each rank on a host of its own"),
        ("--links", "100mbit", "rates of all links, as tc writes them; none: as fast as memory"),
        ("--workloads", "ncf,lstm-zipf,fashion-28-cnn", "by name"),
        ("--local-batch-sizes", "64", "samples of each rank in a step"),
        ("--arms", ",".join(DEFAULT_ARMS), "baselines and codecs, as `bench.exchange` has them"),
        SERVERS_OPTION,
        ("--rounds", 10, "in which each arm trains for some steps"),
        ("--steps", 2, "of an arm in a round"),
        ("--learning-rate", 0.05, "of SGD with momentum 0.9"),
        ("--seed", 1, "of the model and the order of samples"),
    )
    parser.add_argument("--data", metavar="DIR", help="where data sets are (default: the usual places)")
    return parser


def plan_of(options: argparse.Namespace) -> TrainingPlan:
    """The plan.

    Raises:
        ValueError: for what cannot be run.
    """
    arms, links = tuple(options.arms.split(",")), tuple(options.links.split(","))
    servers = numbers("--servers", options.servers, int, 0, MAX_RANKS)
    check_arms(arms, servers)
    check_links(links)
    workloads = tuple(workload_named(name).name for name in options.workloads.split(","))
    return TrainingPlan(
        rank=StepsPlan(
            arms=arms,
            num_rounds=at_least(1, "--rounds", options.rounds),
            num_steps=at_least(1, "--steps", options.steps),
            learning_rate=options.learning_rate,
            seed=options.seed,
            data=options.data,
        ),
        ranks=numbers("--ranks", options.ranks, int, 2, MAX_RANKS),
        links=links,
        workloads=workloads,
        sizes=numbers("--local-batch-sizes", options.local_batch_sizes, int, 1, 4096),
        servers=servers,
    )
