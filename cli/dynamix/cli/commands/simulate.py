"""Run one job on a virtual cluster: real gradients, virtual time.

  dynamix simulate train/mixed-8 --policy rule --png run.png
  dynamix simulate mine.toml --policy static:local_batch_size=128 --seed 3 --json -

SCENARIO is a file (scenarios/README.md), or the name of one that comes with the package.
"""

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from dynamix.cli.arguments import (
    STANDARD_OUTPUT,
    add_data_argument,
    add_json_argument,
    add_option,
    add_png_argument,
    seed,
)
from dynamix.cli.errors import MISUSED, explained, reading
from dynamix.cli.output import Document, write_json
from dynamix.cli.terminal import ProgressLine, formatted, print_table, sizes_text
from dynamix.schemas.messages import Report

if TYPE_CHECKING:
    from dynamix.lab.comparison.rows import Row
    from dynamix.lab.simulator.episode import Episode
    from dynamix.lab.simulator.scenario import Scenario

SINGLE_RANKS = 16
"""The range of more ranks is drawn, since their lines would hide each other."""
MAX_SHOWN = 64
"""Characters of a wrong name that an error repeats."""


class SimulatedWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One window."""

    window: int
    time_s: float
    """Virtual time at its end."""
    step_time_s: float
    local_batch_sizes: list[int]
    """Local batch sizes of its last step."""
    global_batch_size: int
    loss: float | None
    accuracy: float | None
    """Share of the training samples classified correctly."""
    held_out_accuracy: float | None


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("scenario", metavar="SCENARIO", help="a scenario file, or a name such as train/mixed-8")
    add_option(parser, "--policy", "rule", "NAME[:KEY=VALUE,...]")
    parser.add_argument("--policy-file", metavar="FILE", help="of a learned policy, instead of a shipped one")
    add_option(parser, "--seed", 0, "of weights, order of the data and disturbances", type=seed)
    add_data_argument(parser)
    parser.add_argument("--windows", action="store_true", help="show a line for each window")
    add_json_argument(parser)
    add_png_argument(parser, "draw accuracy, batch sizes and step time over virtual time")


def run(arguments: argparse.Namespace) -> int:
    """Run the job and show its result."""
    import torch

    from dynamix.lab.comparison.runs import policy_of
    from dynamix.lab.simulator.episode import run_episode
    from dynamix.lab.workloads import workload_named

    with reading(arguments.scenario, exit_code=MISUSED), explained(ValueError, exit_code=MISUSED):
        scenario = scenario_named(arguments.scenario)
        row = _row(arguments.policy, arguments.policy_file, scenario)
    torch.set_num_threads(1)  # this process is the command's own; a virtual worker's batch is too small for two
    windows: list[SimulatedWindow] = []
    with explained(ValueError, OSError), ProgressLine() as progress:
        progress.show(f"{scenario.name} under {arguments.policy}: loading {scenario.workload}")
        data = workload_named(scenario.workload).load(arguments.data)

        def record(reports: Sequence[Report]) -> None:
            windows.append(one := _window(reports, windows[-1].time_s if windows else 0.0))
            accuracy = "" if one.held_out_accuracy is None else f", accuracy {one.held_out_accuracy:.1%}"
            text = (
                f"window {one.window}: {one.time_s:.1f} of at most {scenario.time_limit_s:g} s, step "
                f"{one.step_time_s * 1000:.1f} ms, batch {one.global_batch_size} = {sizes_text(one.local_batch_sizes)}"
                f"{accuracy}"
            )
            (progress.write_line if arguments.windows else progress.show)(text)

        episode = run_episode(
            scenario,
            policy_of(row),
            data=data,
            seed=arguments.seed,
            policy_options=row.options,
            initial_local_batch_size=row.local_batch_size,
            on_window=record,
        )
    last, reached = windows[-1], episode.time_to_target_s
    rows = [
        (f"time to {scenario.target_accuracy:.1%}", "missed" if reached is None else f"{reached:g} s"),
        (f"accuracy at {scenario.fixed_time_s:g} s", formatted(episode.accuracy_at_fixed_time, "{:.1%}")),
        ("test accuracy at the end", f"{episode.test_accuracy:.1%}"),
        ("virtual time", f"{episode.virtual_time_s:.1f} s"),
        ("windows, steps", f"{episode.num_windows}, {episode.num_steps}"),
        ("samples", f"{episode.samples_seen:,}"),
        ("actions applied", str(len(episode.applied))),
        ("last batch", f"{last.global_batch_size} = {sizes_text(last.local_batch_sizes)}"),
    ]
    title = f"{scenario.name}: {scenario.workload} on {scenario.world_size} workers under {arguments.policy}"
    if arguments.json != STANDARD_OUTPUT:
        print_table(("result", f"seed {arguments.seed}"), rows, left=("result",), title=title)
    write_json(_document(arguments.policy, arguments.seed, episode, windows), arguments.json)
    if arguments.png is not None:
        _draw(title, episode, windows, arguments.png)
    return 0


def scenario_named(text: str) -> "Scenario":
    """A scenario from a file, or one that comes with the package: `train/mixed-8`, or `mixed-8` in either part.

    Raises ValueError when there is none, with those there are.
    """
    from dynamix.lab.simulator.scenario import SUITES, Scenario, scenario_root

    if os.path.isfile(text):  # noqa: PTH113 - False where `Path.is_file` raises: for a name that is too long
        return Scenario.read(text)
    root = scenario_root()
    shipped = {f"{part}/{file.stem}": file for part in SUITES for file in sorted((root / part).glob("*.toml"))}
    fitting = [name for name, file in shipped.items() if text in {name, file.stem}]
    if len(fitting) > 1:
        raise ValueError(f"scenario {text!r} could be {' or '.join(fitting)}: name one of them")
    if not fitting:
        known = ", ".join(shipped)
        raise ValueError(f"scenario {text[:MAX_SHOWN]!r} is neither a file nor among those that are shipped: {known}")
    return Scenario.read(shipped[fitting[0]])


def _row(policy: str, file: str | None, scenario: "Scenario") -> "Row":
    """The policy with its options as they were typed: nothing tuned. Raises ValueError when it cannot be used."""
    from dynamix.lab.comparison.rows import ORACLE, Tuned, parse_rows

    row, *others = parse_rows(policy, {policy.partition(":")[0]: [file]} if file else None)
    if others:
        raise ValueError(f"--policy {policy!r}: name one policy, NAME[:KEY=VALUE,...]")
    if row.policy == ORACLE:
        raise ValueError(f"{ORACLE!r} stands for several runs: use `dynamix evaluate --policies {ORACLE}`")
    settings = row.settings(scenario.family, Tuned())
    if not settings:
        raise ValueError(f"no file of the policy {row.policy!r} is shipped: name one with --policy-file")
    return settings[0]


def _window(reports: Sequence[Report], started_s: float) -> SimulatedWindow:
    totals = reports[0].totals
    samples = max(totals.num_samples, 1)
    sizes = {row.rank: row.local_batch_size for report in reports for row in report.rows}
    return SimulatedWindow(
        window=totals.window,
        time_s=started_s + totals.time_s,
        step_time_s=totals.time_s / totals.num_steps,
        local_batch_sizes=[sizes[rank] for rank in sorted(sizes)],
        global_batch_size=totals.global_batch_size,
        loss=None if totals.loss_sum is None else totals.loss_sum / samples,
        accuracy=None if totals.num_correct is None else totals.num_correct / samples,
        held_out_accuracy=reports[0].held_out_accuracy,
    )


def _document(policy: str, seed: int, episode: "Episode", windows: list[SimulatedWindow]) -> Document:
    """Result of a virtual job; times are virtual."""
    scenario = episode.scenario
    return {
        "scenario": scenario.name,
        "workload": scenario.workload,
        "policy": policy,
        "seed": seed,
        "job": episode.job.job,
        "world_size": scenario.world_size,
        "target_accuracy": scenario.target_accuracy,
        "fixed_time_s": scenario.fixed_time_s,
        "time_to_target_s": episode.time_to_target_s,
        "accuracy_at_fixed_time": episode.accuracy_at_fixed_time,
        "test_accuracy": episode.test_accuracy,
        "virtual_time_s": episode.virtual_time_s,
        "num_windows": episode.num_windows,
        "num_steps": episode.num_steps,
        "samples_seen": episode.samples_seen,
        "num_applied": len(episode.applied),
        "evaluations": [point._asdict() for point in episode.evaluations],
        "windows": windows,
    }


def _draw(title: str, episode: "Episode", windows: list[SimulatedWindow], path: str) -> None:
    """Write a PNG: accuracy, batch sizes and step time over virtual time."""
    from matplotlib.figure import Figure

    from dynamix.cli.figures import COLOURS, finish, save

    figure = Figure(figsize=(9, 9), layout="constrained")
    accuracy, sizes, times = figure.subplots(3, 1, sharex=True, height_ratios=(1.3, 1.3, 1))
    points, reached, target = episode.evaluations, episode.time_to_target_s, episode.scenario.target_accuracy
    accuracy.plot([point.time_s for point in points], [point.accuracy for point in points], color="#0b6e4f")
    accuracy.axhline(target, color="black", linewidth=0.8, linestyle="--")
    if reached is not None:
        accuracy.axvline(reached, color="#0b6e4f", linewidth=1, linestyle=":")
    result = "missed" if reached is None else f"reached at {reached:g} s"
    finish(accuracy, from_zero=False, ylabel="validation accuracy", title=f"target {target:g}: {result}")
    starts = [0.0, *(window.time_s for window in windows)]
    by_rank = [(*row, row[-1]) for row in zip(*(window.local_batch_sizes for window in windows), strict=True)]
    if len(by_rank) <= SINGLE_RANKS:
        alike: dict[tuple[int, ...], list[int]] = {}  # ranks with equal sizes share a line
        for rank, row in enumerate(by_rank):
            alike.setdefault(row, []).append(rank)
        for line, ranks in alike.items():
            label = f"rank {', '.join(map(str, ranks))}"
            sizes.step(starts, line, where="post", label=label, color=COLOURS[ranks[0] % len(COLOURS)])
    else:
        low, high = ([limit(row) for row in zip(*by_rank, strict=True)] for limit in (min, max))
        sizes.fill_between(starts, low, high, step="post", alpha=0.35, label=f"all {len(by_rank)} ranks")
    mean = [sum(row) / len(row) for row in zip(*by_rank, strict=True)]
    sizes.step(starts, mean, where="post", color="black", linewidth=1, linestyle="--", label="mean")
    finish(sizes, beside=1.0, ylabel="local batch size")
    step_times = [window.step_time_s * 1000 for window in windows]
    times.step(starts, [*step_times, step_times[-1]], where="post", color=COLOURS[0])
    finish(times, ylabel="step time [ms]", xlabel="virtual time [s]")
    figure.suptitle(title)
    save(figure, path)
