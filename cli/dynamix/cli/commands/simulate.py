"""Run one job on a virtual cluster: real gradients, virtual time.

  dynamix simulate train/mixed-8 --policy rule --windows
  dynamix simulate mine.toml --policy static:local_batch_size=128 --seed 3 --json -

SCENARIO is a file (scenarios/README.md), or the name of one that comes with the package.
"""

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dynamix.cli.arguments import (
    STANDARD_OUTPUT,
    add_data_argument,
    add_json_argument,
    add_option,
    seed,
)
from dynamix.cli.errors import MISUSED, explained, reading
from dynamix.cli.output import Document, write_json
from dynamix.cli.terminal import ProgressLine, formatted, print_table, sizes_text
from dynamix.schemas.messages import Report

if TYPE_CHECKING:
    from dynamix.lab.simulator.scenario import Scenario

MAX_SHOWN = 64
"""Characters of a wrong name that an error repeats."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("scenario", metavar="SCENARIO", help="a scenario file, or a name such as train/mixed-8")
    add_option(parser, "--policy", "rule", "NAME[:KEY=VALUE,...], as for `dynamix evaluate`")
    add_option(parser, "--seed", 0, "of weights, order of the data and disturbances", type=seed)
    add_data_argument(parser)
    parser.add_argument("--windows", action="store_true", help="show a line for each window")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the job and show its result."""
    import torch

    from dynamix.lab.comparison.rows import ORACLE, Tuned, parse_rows
    from dynamix.lab.comparison.runs import policy_of
    from dynamix.lab.simulator.episode import RunOutcome, run_episode
    from dynamix.lab.workloads import workload_named

    with reading(arguments.scenario, exit_code=MISUSED), explained(ValueError, exit_code=MISUSED):
        scenario = scenario_named(arguments.scenario)
        row, *others = parse_rows(arguments.policy)
        if others:
            raise ValueError(f"--policy {arguments.policy!r}: name one policy, NAME[:KEY=VALUE,...]")
        if row.policy == ORACLE:
            raise ValueError(f"{ORACLE!r} stands for several runs: use `dynamix evaluate --policies {ORACLE}`")
        settings = row.settings(scenario.family, Tuned())  # as they were typed: nothing tuned
        if not settings:
            raise ValueError(f"no file of the policy {row.policy!r} is shipped: name one, as in mine:files=FILE")
    torch.set_num_threads(1)  # this process is the command's own; a virtual worker's batch is too small for two
    windows: list[Document] = []
    with explained(ValueError, OSError), ProgressLine() as progress:
        progress.show(f"{scenario.name} under {arguments.policy}: loading {scenario.workload}")
        data = workload_named(scenario.workload).load(arguments.data)

        def record(reports: Sequence[Report]) -> None:
            totals, accuracy = reports[0].totals, reports[0].held_out_accuracy
            samples = max(totals.num_samples, 1)
            sizes = {row.rank: row.local_batch_size for one in reports for row in one.rows}
            windows.append(
                {
                    "window": totals.window,
                    "time_s": (windows[-1]["time_s"] if windows else 0.0) + totals.time_s,
                    "step_time_s": totals.time_s / totals.num_steps,
                    "local_batch_sizes": [size for _, size in sorted(sizes.items())],
                    "global_batch_size": totals.global_batch_size,
                    "loss": None if totals.loss_sum is None else totals.loss_sum / samples,
                    "accuracy": None if totals.num_correct is None else totals.num_correct / samples,
                    "held_out_accuracy": accuracy,
                }
            )
            one = windows[-1]
            text = (
                f"window {one['window']}: {one['time_s']:.1f} of at most {scenario.time_limit_s:g} s, step "
                f"{one['step_time_s'] * 1000:.1f} ms, batch {one['global_batch_size']} = "
                f"{sizes_text(one['local_batch_sizes'])}" + ("" if accuracy is None else f", accuracy {accuracy:.1%}")
            )
            (progress.write_line if arguments.windows else progress.show)(text)

        episode = run_episode(
            scenario,
            policy_of(settings[0]),
            data=data,
            seed=arguments.seed,
            policy_options=settings[0].options,
            initial_local_batch_size=settings[0].local_batch_size,
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
        ("last batch", f"{last['global_batch_size']} = {sizes_text(last['local_batch_sizes'])}"),
    ]
    title = f"{scenario.name}: {scenario.workload} on {scenario.world_size} workers under {arguments.policy}"
    if arguments.json != STANDARD_OUTPUT:
        print_table(("result", f"seed {arguments.seed}"), rows, left=("result",), title=title)
    result = {
        "scenario": scenario,
        "policy": arguments.policy,
        "seed": arguments.seed,
        **{name: getattr(episode, name) for name in RunOutcome.__struct_fields__ if name != "wall_s"},
        "num_applied": len(episode.applied),
        "windows": windows,
    }
    write_json(result, arguments.json)
    return 0


def scenario_named(text: str) -> "Scenario":
    """A scenario from a file, or one that comes with the package, such as `train/mixed-8`.

    Raises ValueError when there is none, with those there are.
    """
    from dynamix.lab.simulator.scenario import SUITES, Scenario, scenario_root

    root = scenario_root()
    shipped = {f"{part}/{file.stem}": str(file) for part in SUITES for file in sorted((root / part).glob("*.toml"))}
    path = shipped.get(text, text)
    if not os.path.isfile(path):  # noqa: PTH113 - False where `Path.is_file` raises: for a name that is too long
        known = ", ".join(shipped)
        raise ValueError(f"scenario {text[:MAX_SHOWN]!r} is neither a file nor among those that are shipped: {known}")
    return Scenario.read(path)
