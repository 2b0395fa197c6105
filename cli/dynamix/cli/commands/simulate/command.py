"""Run one job on a virtual cluster: real gradients, virtual time.

  dynamix simulate train/mixed-8 --policy rule --png run.png
  dynamix simulate mine.toml --policy static@128 --seed 3 --json -

SCENARIO is a file (scenarios/README.md), or the name of one that comes with the package. A policy is spelled as for
`dynamix evaluate`. With --bus the services on the bus steer the job, as they steer real ones: reward and arbitrator
must run (`dynamix up`); the collectors of the virtual nodes are started here.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dynamix.cli.errors import CommandError
from dynamix.cli.output import STANDARD_OUTPUT, add_json_argument, add_png_argument, write_json, writing
from dynamix.cli.progress import ProgressLine

if TYPE_CHECKING:
    from .simulation import SimulatedWindow, Simulation, SimulationPlan

POLICY = "rule"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("scenario", metavar="SCENARIO", help="a scenario file, or a name such as train/mixed-8")
    parser.add_argument(
        "--policy", default=POLICY, help="NAME[+track][:option=number,...][@SIZE] (default: %(default)s)"
    )
    parser.add_argument("--policy-file", metavar="FILE", help="of a learned policy, instead of a shipped one")
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, order of the data and disturbances (default: %(default)s)"
    )
    parser.add_argument("--data", metavar="DIR", help="directory with the data sets (default: the usual places)")
    parser.add_argument("--device", default="cpu", help="where the gradients are computed (default: %(default)s)")
    parser.add_argument("--windows", action="store_true", help="show a line for each window")
    parser.add_argument("--bus", action="store_true", help="let the services on the bus decide")
    add_json_argument(parser)
    add_png_argument(parser, "draw accuracy, batch sizes and step time over virtual time")


def run(namespace: argparse.Namespace) -> int:
    """Run the job and show what came of it."""
    if namespace.seed < 0:
        raise CommandError(f"--seed {namespace.seed}: it must not be negative", exit_code=2)
    if namespace.bus and namespace.policy_file:
        raise CommandError("--policy-file: on the bus, policies come from there (`dynamix policy import`)", exit_code=2)
    from .simulation import plan  # noqa: PLC0415 - torch: only once it is needed

    try:
        planned = plan(namespace.scenario, namespace.policy, namespace.policy_file, seed=namespace.seed)
    except ValueError as error:
        raise CommandError(str(error), exit_code=2) from error
    simulation = _run(planned, namespace)
    _show(simulation, namespace)
    return 0


def _run(planned: "SimulationPlan", namespace: argparse.Namespace) -> "Simulation":
    from .simulation import simulate  # noqa: PLC0415 - see above
    from .view import window_text  # noqa: PLC0415 - rich: only once it is needed

    scenario = planned.scenario
    try:
        with ProgressLine() as progress:
            progress.show(f"{scenario.name} under {planned.label}: loading {scenario.workload}")

            def show(line: "SimulatedWindow") -> None:
                text = window_text(line, scenario.time_limit_s)
                (progress.say if namespace.windows else progress.show)(text)

            return simulate(planned, namespace.data, device=namespace.device, on_window=show, bus=namespace.bus)
    except (ValueError, OSError) as error:  # data that is missing, a device; the text says how to mend it
        raise CommandError(str(error)) from error


def _show(simulation: "Simulation", namespace: argparse.Namespace) -> None:
    from .view import show_summary  # noqa: PLC0415 - see above

    show_summary(simulation, stderr=namespace.json == STANDARD_OUTPUT)
    if namespace.json is not None:
        write_json(simulation, namespace.json)
    if namespace.png is not None:
        from .figure import draw  # noqa: PLC0415 - matplotlib: only once it is needed

        with writing(namespace.png):
            draw(simulation, Path(namespace.png))
