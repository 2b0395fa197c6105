"""Fit a virtual cluster to a real job: its metric windows become a scenario file.

  dynamix calibrate JOB --workload fashion-14-cnn -o mine.toml --png mine.png

SOURCE is a job's id or name on the bus, or a file that --save has written. The local batch sizes should have varied:
run the job with `--policy random`. Each window's virtual step time comes from a fit that has not seen that window.
"""

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dynamix.cli.broker import connected
from dynamix.cli.connection import find
from dynamix.cli.errors import CommandError
from dynamix.cli.output import STANDARD_OUTPUT, add_json_argument, write_json

from . import recording
from .recording import Record, Recording
from .source import recorded

if TYPE_CHECKING:
    from dynamix.trainer.virtual.calibration import Calibration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("source", metavar="SOURCE", help="a job's id or name, or a recording")
    parser.add_argument("--workload", metavar="NAME", help="what the virtual cluster trains: see `dynamix simulate`")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the scenario (TOML)")
    parser.add_argument("--save", metavar="FILE", help="record the job's windows, to be a SOURCE later")
    parser.add_argument("--optimizer", choices=("sgd", "adam", "adamw"), help="(default: of the job's family)")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="(default: %(default)s)")
    parser.add_argument("--target", type=float, help="validation accuracy (default: the best that the job reported)")
    parser.add_argument(
        "--topology", choices=("ring", "parameter-server"), default="ring", help="(default: %(default)s)"
    )
    parser.add_argument("--servers", type=int, default=1, help="parameter servers (default: %(default)s)")
    add_json_argument(parser)
    parser.add_argument("--png", metavar="FILE", help="draw virtual against real step times")


def run(namespace: argparse.Namespace) -> int:
    """Record, fit and write what is asked for."""
    if not (namespace.workload or namespace.save):
        raise CommandError("say what the virtual cluster shall train, --workload NAME, or --save FILE", exit_code=2)
    records = _records(namespace.source)
    found = recording.understood(records, namespace.source)
    if namespace.save:
        recording.write(Path(namespace.save), records)
        _say(namespace, f"{len(found.windows)} windows saved in {namespace.save}")
    return _calibrate(namespace, found) if namespace.workload else 0


def _records(source: str) -> list[Record]:
    """From the file of that name if there is one, else from the bus."""
    return recording.read(Path(source)) if Path(source).is_file() else asyncio.run(_from_bus(source))


async def _from_bus(wanted: str) -> list[Record]:
    async with connected(find(os.environ), "calibrate") as bus:
        return await recorded(bus, wanted)


def _calibrate(namespace: argparse.Namespace, found: Recording) -> int:
    from dynamix.trainer.virtual.calibration import Settings, calibrate  # noqa: PLC0415 - torch: only once it is needed

    settings = Settings(
        workload=namespace.workload,
        name=Path(namespace.output).stem if namespace.output else "calibrated",
        optimizer=namespace.optimizer,
        learning_rate=namespace.learning_rate,
        target_accuracy=namespace.target,
        topology=namespace.topology,
        num_servers=namespace.servers,
    )
    try:
        calibration = calibrate(found.windows, settings, found.job)
    except ValueError as error:
        raise CommandError(f"{namespace.source}: {error}") from error
    _write(namespace, calibration)
    return 0


def _write(namespace: argparse.Namespace, calibration: "Calibration") -> None:
    from .table import show  # noqa: PLC0415 - rich: only once it is needed

    show(calibration, stderr=namespace.json == STANDARD_OUTPUT)
    if namespace.output:
        _write_scenario(calibration, namespace.source, Path(namespace.output))
        _say(namespace, f"Scenario: {namespace.output}; try it: dynamix simulate {namespace.output}")
    if namespace.png:
        from .figure import draw  # noqa: PLC0415 - matplotlib: only once it is needed

        draw(calibration, namespace.source, Path(namespace.png))
        _say(namespace, f"Picture: {namespace.png}")
    if namespace.json is not None:
        write_json(calibration, namespace.json)


def _write_scenario(calibration: "Calibration", source: str, path: Path) -> None:
    from dynamix.trainer.virtual.calibration import scenario_text  # noqa: PLC0415 - torch: only once it is needed

    comment = (
        f"Fitted to {calibration.num_windows} windows of {Path(source).name}; step times are off by "
        f"{calibration.median_error:.1%} in the median."
    )
    try:
        path.write_text(scenario_text(calibration.scenario, (comment,)))
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error


def _say(namespace: argparse.Namespace, text: str) -> None:
    if namespace.json != STANDARD_OUTPUT:
        print(text)
