"""Run one job on a virtual cluster: real gradients, virtual time.

  dynamix simulate train/mixed-8 --policy rule --png run.png
  dynamix simulate mine.toml --policy static:local_batch_size=128 --seed 3 --json -

SCENARIO is a file (scenarios/README.md), or the name of one that comes with the package. With --bus the services on the
bus make the decisions: reward and arbitrator must run (`dynamix up`).
"""

import argparse
from typing import TYPE_CHECKING

from dynamix.cli.arguments import (
    STANDARD_OUTPUT,
    add_data_argument,
    add_json_argument,
    add_option,
    add_png_argument,
    seed,
)
from dynamix.cli.errors import MISUSED, MisuseError, explained, reading
from dynamix.cli.output import write_json
from dynamix.cli.terminal import ProgressLine, formatted, print_table, sizes_text

if TYPE_CHECKING:
    from .simulation import SimulatedWindow, Simulation, SimulationPlan


SINGLE_RANKS = 16
"""The range of more ranks is drawn, since their lines would hide each other."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("scenario", metavar="SCENARIO", help="a scenario file, or a name such as train/mixed-8")
    add_option(parser, "--policy", "rule", "NAME[:KEY=VALUE,...]")
    parser.add_argument("--policy-file", metavar="FILE", help="file of a learned policy that is not in the package")
    add_option(parser, "--seed", 0, "random seed of weights, order of the data and disturbances", type=seed)
    add_data_argument(parser)
    parser.add_argument("--windows", action="store_true", help="show a line for each window")
    parser.add_argument("--bus", action="store_true", help="let the services on the bus decide")
    add_json_argument(parser)
    add_png_argument(parser, "draw accuracy, batch sizes and step time over virtual time")


def run(arguments: argparse.Namespace) -> int:
    """Run the job and show what came of it."""
    if arguments.bus and arguments.policy_file:
        raise MisuseError("--policy-file: on the bus, policies come from there (`dynamix policy import`)")
    from .simulation import plan

    with reading(arguments.scenario, exit_code=MISUSED), explained(ValueError, exit_code=MISUSED):
        planned = plan(arguments.scenario, arguments.policy, arguments.policy_file, seed=arguments.seed)
    simulation = _run(planned, arguments)
    _show_summary(simulation, stderr=arguments.json == STANDARD_OUTPUT)
    write_json(simulation.document(), arguments.json)
    if arguments.png is not None:
        _draw(simulation, arguments.png)
    return 0


def _run(planned: "SimulationPlan", arguments: argparse.Namespace) -> "Simulation":
    from .simulation import simulate

    scenario = planned.scenario
    with explained(ValueError, OSError), ProgressLine() as progress:
        progress.show(f"{scenario.name} under {planned.label}: loading {scenario.workload}")

        def show(line: "SimulatedWindow") -> None:
            text = _window_text(line, scenario.time_limit_s)
            (progress.write_line if arguments.windows else progress.show)(text)

        return simulate(planned, arguments.data, on_window=show, bus=arguments.bus)


def _window_text(line: "SimulatedWindow", limit_s: float) -> str:
    """One window in a line; `limit_s` is the virtual time at which the job ends at the latest."""
    accuracy = "" if line.held_out_accuracy is None else f", accuracy {line.held_out_accuracy:.1%}"
    return (
        f"window {line.window}: {line.time_s:.1f} of at most {limit_s:g} s, step "
        f"{line.step_time_s * 1000:.1f} ms, batch {line.global_batch_size} = {sizes_text(line.local_batch_sizes)}"
        f"{accuracy}"
    )


def _show_summary(simulation: "Simulation", *, stderr: bool) -> None:
    """Print the outcome as a table."""
    episode, scenario = simulation.episode, simulation.episode.scenario
    reached = episode.time_to_target_s
    last = simulation.windows[-1]
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
    what = f"{scenario.name} ({scenario.workload}, {scenario.world_size} workers)"
    title = f"{what} under {simulation.policy}, seed {simulation.seed}"
    print_table(("name", "value"), rows, left=("name",), title=title, stderr=stderr)


def _draw(simulation: "Simulation", path: str) -> None:
    """Write a PNG: accuracy, batch sizes and step time over virtual time."""
    from matplotlib.figure import Figure

    from dynamix.cli.figures import COLOURS, finish, save

    figure = Figure(figsize=(9, 9), layout="constrained")
    accuracy, sizes, times = figure.subplots(3, 1, sharex=True, height_ratios=(1.3, 1.3, 1))
    points, reached = simulation.episode.evaluations, simulation.episode.time_to_target_s
    target = simulation.episode.scenario.target_accuracy
    accuracy.plot([point.time_s for point in points], [point.accuracy for point in points], color="#0b6e4f")
    accuracy.axhline(target, color="black", linewidth=0.8, linestyle="--")
    if reached is not None:
        accuracy.axvline(reached, color="#0b6e4f", linewidth=1, linestyle=":")
    result = "missed" if reached is None else f"reached at {reached:g} s"
    finish(accuracy, from_zero=False, ylabel="validation accuracy", title=f"target {target:g}: {result}")
    starts = [0.0, *(window.time_s for window in simulation.windows)]
    by_rank = [(*row, row[-1]) for row in zip(*(w.local_batch_sizes for w in simulation.windows), strict=True)]
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
    step_times = [window.step_time_s * 1000 for window in simulation.windows]
    times.step(starts, [*step_times, step_times[-1]], where="post", color=COLOURS[0])
    finish(times, ylabel="step time [ms]", xlabel="virtual time [s]")
    scenario = simulation.episode.scenario
    what = f"{scenario.name}: {scenario.workload} on {scenario.world_size} workers"
    figure.suptitle(f"{what} under {simulation.policy}")
    save(figure, path)
