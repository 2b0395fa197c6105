"""Suites small enough for tests: a scenario whose episode takes a fraction of a second, and made-up outcomes."""

from collections.abc import Callable, Generator, Iterable
from pathlib import Path

from dynamix.lab.comparison.rows import Choice, Tuned
from dynamix.lab.comparison.runs import RunTask
from dynamix.lab.simulator.cluster import Evaluation
from dynamix.lab.simulator.episode import RunOutcome
from dynamix.lab.simulator.scenario import Suite, read_suite

MIXED = """
family = "{family}"
workload = "fashion-14-mlp"
num_train_samples = 2000
evaluation_samples = 500
target_accuracy = 0.5
fixed_time_s = 1.0
time_limit_s = 2.0
evaluate_every_s = 0.1
base_global_batch_size = 64
initial_local_batch_size = 32
min_local_batch_size = 8
max_local_batch_size = 256

[network]
bandwidth_mbit_s = 10000

[[workers]]
count = 1
samples_per_s = 4000

[[workers]]
count = 1
samples_per_s = {slow}
"""


def write_suite(directory: Path, **slow_by_family: int) -> Suite:
    """Scenarios of two workers, one file per family; the second worker's samples per second are given."""
    directory.mkdir(parents=True, exist_ok=True)
    for family, slow in slow_by_family.items():
        name = family.replace("_", "-")
        (directory / f"{name}-2.toml").write_text(MIXED.format(family=name, slow=slow))
    return read_suite(directory)


def tuned_for(**static_by_family: int) -> Tuned:
    """Settings as `dynamix evaluate tune` writes them: a static size per family, 128 over all."""
    goodput = Choice(setting="goodput", options={"noise_multiplier": 2.0})

    def choices(size: int) -> dict[str, Choice]:
        return {"static": Choice(setting=f"static@{size}", initial_local_batch_size=size), "goodput": goodput}

    families = {family.replace("_", "-"): choices(size) for family, size in static_by_family.items()}
    return Tuned(families=families, overall=choices(128))


def made_up(time_to_target_s: Callable[[RunTask], float | None]) -> Callable[..., Generator[tuple[int, RunOutcome]]]:
    """Stands in for the pool: outcomes by a formula instead of by training."""

    def run_episodes(_: object, tasks: Iterable[RunTask], **__: object) -> Generator[tuple[int, RunOutcome]]:
        for index, task in enumerate(tasks):
            yield index, outcome(time_to_target_s(task))

    return run_episodes


def outcome(time_to_target_s: float | None) -> RunOutcome:
    """An outcome of which only the time matters."""
    return RunOutcome(
        time_to_target_s=time_to_target_s,
        accuracy_at_fixed_time=0.5,
        test_accuracy=0.6,
        num_steps=10,
        num_windows=1,
        samples_seen=640,
        virtual_time_s=2.0,
        evaluations=[Evaluation(0.0, 0.1, 0), Evaluation(1.0, 0.5, 640)],
        wall_s=0.5,
    )
