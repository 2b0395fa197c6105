"""What rounded gradients and local steps cost in accuracy: `python -m bench.accuracy [--json FILE] [--seeds N]`.

Virtual clusters train a model of Fashion-MNIST for some epochs: every worker has a gradient of its own and the
trainer's codecs sum them, so that accuracy is that of real ranks, whatever time it takes. Four workers, one three times
as slow as the others, divide 256 samples per step by their speeds, so that weights differ. Arms are paired by seed,
which decides weights and order of the data: shown is the accuracy on the test part at the end, and its difference to
exact training in points, with the mean's 95 % interval by Student's t.
"""

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from bench.harness.command import BenchmarkReport, Target, benchmark_parser, run_benchmark
from bench.harness.tables import formatted
from scipy.special import stdtrit

from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.simulator.scenario import Scenario, Workers
from dynamix.lab.workloads import Data, workload_named
from dynamix.schemas.messages.allocation import EXCHANGE_CODECS

EXACT_ARM = "exact"
ARMS: dict[str, dict[str, float]] = {
    EXACT_ARM: {},
    **{codec: {"codec": EXCHANGE_CODECS.index(codec)} for codec in ("int8", "powersgd")},
    "h=4": {"every": 4},
    "h=4, int8": {"every": 4, "codec": EXCHANGE_CODECS.index("int8")},
}
"""Options of the policy `static`."""
JUDGED = ("int8", "h=4", "h=4, int8")
MOST_LOST = 0.3
"""Points of accuracy."""
FAR_S = 1e9
COLUMNS = {
    "": "{name}",
    "accuracy": "{accuracy:.2f} %",
    "difference": "{difference:+.2f}",
    "interval": "[{low:+.2f}, {high:+.2f}]",
    "seeds": "{num_seeds}",
}


class ArmAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """One row; accuracies and differences are in percent and points."""

    name: str
    accuracies: tuple[float, ...]
    """By seed."""
    accuracy: float
    difference: float
    low: float
    high: float
    num_seeds: int


def scenario(workload: str) -> Scenario:
    """A cluster whose clock decides nothing but the division of a step."""
    return Scenario(
        name="accuracy",
        family="accuracy",
        workload=workload,
        workers=(Workers(count=3, samples_per_s=3000.0), Workers(count=1, samples_per_s=1000.0)),
        target_accuracy=1.0,
        fixed_time_s=0.0,
        time_limit_s=FAR_S,
        evaluate_every_s=FAR_S,
        initial_local_batch_size=64,
        exchange="local",
    )


def final_accuracy(data: Data, workload: str, options: dict[str, float], *, seed: int, num_epochs: float) -> float:
    """Percent of the test part after so many epochs, at the newest end of a round of local steps."""
    cluster = VirtualCluster(
        scenario(workload), data, seed=seed, policy="static", policy_options={"track": 1, **options}
    )
    num_samples = num_epochs * len(data.train.labels)
    while cluster.position.samples_seen < num_samples:
        cluster.run_window()
    cluster.end()
    return 100 * cluster.test_accuracy()


def row_of(name: str, accuracies: Sequence[float], exact: Sequence[float]) -> ArmAccuracy:
    """The mean of an arm, and of its differences by seed."""
    differences = [mine - theirs for mine, theirs in zip(accuracies, exact, strict=True)]
    mean, count = statistics.fmean(differences), len(differences)
    spread = (
        statistics.stdev(differences) / count**0.5 * float(stdtrit(count - 1, 0.975)) if count > 1 else float("inf")
    )
    return ArmAccuracy(
        name=name,
        accuracies=tuple(accuracies),
        accuracy=statistics.fmean(accuracies),
        difference=mean,
        low=mean - spread,
        high=mean + spread,
        num_seeds=count,
    )


def measure(workload: str, num_seeds: int, num_epochs: float) -> BenchmarkReport:
    """Train every arm under every seed; one line of progress for each."""
    data = workload_named(workload).load()
    found: dict[str, list[float]] = {name: [] for name in ARMS}
    for seed in range(num_seeds):
        for name, options in ARMS.items():
            found[name].append(final_accuracy(data, workload, options, seed=seed, num_epochs=num_epochs))
            sys.stderr.write(f"  seed {seed}, {name}: {found[name][-1]:.2f} %\n")
    rows = [row_of(name, accuracies, found[EXACT_ARM]) for name, accuracies in found.items()]
    targets = [
        Target(name=f"{row.name}, points at least", value=row.low, at_least=-MOST_LOST)
        for row in rows
        if row.name in JUDGED
    ]
    figures: dict[str, Any] = {"workload": workload, "num_epochs": num_epochs, "rows": rows}
    return BenchmarkReport(figures, formatted([msgspec.to_builtins(row) for row in rows], COLUMNS), targets=targets)


def main() -> int:
    """Run, print, write; 1 when an arm may lose more than `MOST_LOST`."""
    parser = benchmark_parser(
        *("accuracy", __doc__),
        ("--workload", "fashion-14-mlp", "model and data"),
        ("--seeds", 12, "runs of each arm"),
        ("--epochs", 6.0, "passes over the training part"),
    )
    options = parser.parse_args()
    return run_benchmark("accuracy", options, lambda: measure(options.workload, options.seeds, options.epochs))


if __name__ == "__main__":
    sys.exit(main())
