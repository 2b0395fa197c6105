"""Arguments that bench.cluster and bench.cluster.table share, and what they mean."""

import argparse
from typing import Any, TypeVar, get_args

import msgspec
from bench.cluster.plan import ClusterPlan, Probe
from bench.harness.command import benchmark_parser

DEFAULTS = ClusterPlan()
NO_LIMIT = "none"

Value = TypeVar("Value", str, float)


def cluster_parser(name: str, description: str | None, *, has_figure: bool = False) -> argparse.ArgumentParser:
    """Parser with the hosts and the length of a run."""
    parser = benchmark_parser(name, description, has_figure=has_figure)
    for option, kind, default, meaning in (
        ("--hosts", int, DEFAULTS.num_hosts, "number of hosts, one rank on each"),
        ("--cpu", str, DEFAULTS.cores, "cores of each host, or none for no limit"),
        ("--windows", int, DEFAULTS.num_windows, "of a run"),
        ("--window-steps", int, DEFAULTS.window_steps, "steps in a window"),
        ("--warm-up", int, DEFAULTS.num_warm_up_windows, "windows not measured"),
        ("--local-batch-size", int, 32, "to begin with"),
        ("--seed", int, DEFAULTS.seed, "of model and data"),
    ):
        parser.add_argument(option, type=kind, default=default, help=f"{meaning} (default: %(default)s)")
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
        cores=None if options.cpu == NO_LIMIT else float(options.cpu),
        queue_limit_bytes=options.queue_limit,
        num_windows=options.windows,
        window_steps=options.window_steps,
        num_warm_up_windows=options.warm_up,
        probe=options.probe,
        seed=options.seed,
        data=options.data,
        **slow,
    )


def by_rank(pairs: list[str] | None, convert: type[Value]) -> dict[int, Value]:
    """From `RANK=VALUE` to a value per rank.

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


def as_json(value: msgspec.Struct) -> Any:
    """What `json` can write."""
    return msgspec.to_builtins(value, str_keys=True)
