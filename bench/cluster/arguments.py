"""Arguments that bench.cluster and bench.cluster.table share, and what they mean."""

import argparse
from typing import Any, TypeVar, get_args

import msgspec
from bench.cluster.plan import Plan, Probe
from bench.output import add_output_arguments

DEFAULTS = Plan()
NO_LIMIT = "none"
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

Value = TypeVar("Value", str, float)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Hosts, the length of a run, and where the results go."""
    add_output_arguments(parser)
    parser.add_argument("--hosts", type=int, default=DEFAULTS.num_hosts, help="(default: %(default)s)")
    parser.add_argument(
        "--cpu", default=str(DEFAULTS.cores), metavar="CORES", help="of each host, or none (default: %(default)s)"
    )
    parser.add_argument(
        "--queue-limit", type=int, metavar="BYTES", help="of slow links; 4500 to 10000 lose thousands of segments"
    )
    parser.add_argument("--windows", type=int, default=DEFAULTS.num_windows, help="of a run (default: %(default)s)")
    parser.add_argument(
        "--window-steps", type=int, default=DEFAULTS.window_steps, help="steps in a window (default: %(default)s)"
    )
    parser.add_argument(
        "--warm-up", type=int, default=DEFAULTS.num_warm_up_windows, help="windows not measured (default: %(default)s)"
    )
    parser.add_argument("--local-batch-size", type=int, default=32, help="to begin with (default: %(default)s)")
    parser.add_argument(
        "--probe", choices=get_args(Probe), default=DEFAULTS.probe, help="of the collectors (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=DEFAULTS.seed)
    parser.add_argument("--data", metavar="DIR", help="directory with Fashion-MNIST's four idx files")


def plan_of(options: argparse.Namespace, **slow: Any) -> Plan:
    """The plan.

    Raises:
        ValueError: for what cannot be run.
    """
    return Plan(
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
