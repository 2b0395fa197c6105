"""Fit a virtual cluster to a real job: its metric windows become a scenario file.

  dynamix calibrate JOB --workload fashion-14-cnn -o mine.toml --png mine.png

SOURCE is a job on the bus, or a capture of one (`dynamix capture JOB -o FILE`). The local batch sizes should have
varied: run the job with `--policy random`. Each window's virtual step time comes from a fit that has not seen it.
"""

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dynamix.cli.connection import connected, find
from dynamix.cli.errors import CommandError
from dynamix.cli.output import (
    SCENARIO,
    STANDARD_OUTPUT,
    add_json_argument,
    add_option,
    add_output_argument,
    add_png_argument,
    write_json,
    writing,
)
from dynamix.runtime import output_files

from .source import CalibrationInput, from_bus, from_capture

if TYPE_CHECKING:
    from dynamix.lab.calibration import Calibration


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("source", metavar="SOURCE", help="a job's id or how it begins, or a capture")
    parser.add_argument(
        "--workload", metavar="NAME", required=True, help="what the virtual cluster trains: see `dynamix simulate`"
    )
    add_output_argument(parser, SCENARIO, "write the scenario (TOML)")
    parser.add_argument("--optimizer", choices=("sgd", "adam", "adamw"), help="(default: of the job's family)")
    add_option(parser, "--learning-rate", 0.05)
    parser.add_argument("--target", type=float, help="validation accuracy (default: the best that the job reported)")
    add_option(parser, "--topology", "ring", choices=("ring", "parameter-server"))
    add_option(parser, "--servers", 1, "parameter servers")
    add_json_argument(parser)
    add_png_argument(parser, "draw virtual against real step times")


def run(arguments: argparse.Namespace) -> int:
    """Read, fit and write what is asked for."""
    from dynamix.lab.calibration import CalibrationSettings, calibrate

    from .view import show

    path = Path(arguments.source)
    found = from_capture(path) if path.is_file() else asyncio.run(_from_bus(arguments.source))
    settings = CalibrationSettings(
        workload=arguments.workload,
        name=Path(arguments.output).stem if arguments.output else "calibrated",
        optimizer=arguments.optimizer,
        learning_rate=arguments.learning_rate,
        target_accuracy=arguments.target,
        topology=arguments.topology,
        num_servers=arguments.servers,
    )
    try:
        calibration = calibrate(found.windows, settings, found.job)
    except ValueError as error:
        raise CommandError(f"{arguments.source}: {error}") from error
    show(calibration, stderr=arguments.json == STANDARD_OUTPUT)
    _write_files(arguments, calibration)
    write_json(calibration, arguments.json)
    return 0


async def _from_bus(wanted: str) -> CalibrationInput:
    async with connected(find(os.environ), "calibrate") as bus:
        return await from_bus(bus, wanted)


def _write_files(arguments: argparse.Namespace, calibration: "Calibration") -> None:
    made = []
    if arguments.output:
        _write_scenario(calibration, arguments.source, Path(arguments.output))
        made.append(f"Scenario: {arguments.output}; try it: dynamix simulate {arguments.output}")
    if arguments.png:
        from .figure import draw

        draw(calibration, arguments.source, arguments.png)
        made.append(f"Picture: {arguments.png}")
    if made and arguments.json != STANDARD_OUTPUT:
        print("\n".join(made))


def _write_scenario(calibration: "Calibration", source: str, path: Path) -> None:
    from dynamix.lab.calibration import scenario_text

    comment = (
        f"Fitted to {calibration.num_windows} windows of {Path(source).name}; step times are off by "
        f"{calibration.median_error:.1%} in the median."
    )
    with writing(path):
        output_files.write(path, scenario_text(calibration.scenario, (comment,)).encode())
