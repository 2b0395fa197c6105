"""Run one job on a virtual cluster: real gradients, virtual time.

  dynamix simulate train/mixed-8 --policy rule --png run.png
  dynamix simulate mine.toml --policy static:local_batch_size=128 --seed 3 --json -

SCENARIO is a file (scenarios/README.md), or the name of one that comes with the package. A policy is spelled as for
`dynamix evaluate --policies`. With --bus the services on the bus steer the job, as they steer real ones: reward and
arbitrator must run (`dynamix up`); the collectors of the virtual nodes are started here.
"""

import argparse
from typing import TYPE_CHECKING

from dynamix.cli.errors import MISUSED, MisuseError, explained, reading
from dynamix.cli.numbers import seed
from dynamix.cli.output import STANDARD_OUTPUT, add_json_argument, add_option, add_png_argument, write_json
from dynamix.cli.progress import ProgressLine
from dynamix.cli.runs import add_data_argument

if TYPE_CHECKING:
    from .simulation import SimulatedWindow, Simulation, SimulationPlan


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("scenario", metavar="SCENARIO", help="a scenario file, or a name such as train/mixed-8")
    add_option(parser, "--policy", "rule", "NAME[:KEY=VALUE,...]")
    parser.add_argument("--policy-file", metavar="FILE", help="of a learned policy, instead of a shipped one")
    add_option(parser, "--seed", 0, "of weights, order of the data and disturbances", type=seed)
    add_data_argument(parser)
    add_option(parser, "--device", "cpu", "where the gradients are computed")
    parser.add_argument("--windows", action="store_true", help="show a line for each window")
    parser.add_argument("--bus", action="store_true", help="let the services on the bus decide")
    add_json_argument(parser)
    add_png_argument(parser, "draw accuracy, batch sizes and step time over virtual time")


def run(arguments: argparse.Namespace) -> int:
    """Run the job and show what came of it."""
    if arguments.bus and arguments.policy_file:
        raise MisuseError("--policy-file: on the bus, policies come from there (`dynamix policy import`)")
    from .simulation import plan
    from .view import show_summary

    with reading(arguments.scenario, exit_code=MISUSED), explained(ValueError, exit_code=MISUSED):
        planned = plan(arguments.scenario, arguments.policy, arguments.policy_file, seed=arguments.seed)
    simulation = _run(planned, arguments)
    show_summary(simulation, stderr=arguments.json == STANDARD_OUTPUT)
    write_json(simulation.document(), arguments.json)
    if arguments.png is not None:
        from .figure import draw

        draw(simulation, arguments.png)
    return 0


def _run(planned: "SimulationPlan", arguments: argparse.Namespace) -> "Simulation":
    from .simulation import simulate
    from .view import window_text

    scenario = planned.scenario
    with explained(ValueError, OSError), ProgressLine() as progress:
        progress.show(f"{scenario.name} under {planned.label}: loading {scenario.workload}")

        def show(line: "SimulatedWindow") -> None:
            text = window_text(line, scenario.time_limit_s)
            (progress.write_line if arguments.windows else progress.show)(text)

        return simulate(planned, arguments.data, device=arguments.device, on_window=show, bus=arguments.bus)
