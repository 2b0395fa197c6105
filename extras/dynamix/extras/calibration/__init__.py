"""Fit a virtual cluster to a real job: its metric windows become a scenario file.

  dynamix calibrate JOB --workload fashion-14-cnn -o mine.toml

SOURCE is a job on the bus, or a capture of one (`dynamix capture JOB -o FILE`). The local batch sizes should have
varied: run the job with `--policy random`. Each window's virtual step time comes from a fit on other windows. What
windows do not show (learning_rate, the kind of Adam, a target) has a default: set it in the scenario.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dynamix.cli.arguments import STANDARD_OUTPUT, add_json_argument, add_output_argument
from dynamix.cli.errors import CommandError, MisuseError, explained, reading
from dynamix.cli.output import SCENARIO, write_file, write_json
from dynamix.cli.terminal import print_table
from dynamix.extras.export import capture_of, is_file_name
from dynamix.recording.capture import CaptureError, CaptureReader
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode_any
from dynamix.schemas.messages import Job, Message, MetricWindow
from dynamix.schemas.streams import FEED

if TYPE_CHECKING:
    from .fit import Calibration


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("source", metavar="SOURCE", help="a job's id or its first characters, or a capture")
    parser.add_argument(
        "--workload",
        metavar="NAME",
        required=True,
        help="the workload that the virtual cluster trains (scenarios/README.md)",
    )
    add_output_argument(parser, SCENARIO, "write the scenario (TOML)")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read the job, fit the cluster, and write the results."""
    from .fit import calibrate, scenario_text

    path, name = Path(arguments.source), Path(arguments.output or "calibrated").stem
    if not subjects.is_token(name):
        raise MisuseError(
            f"--output {arguments.output}: the scenario gets the name of the file: use 1 to 63 of the characters a-z, "
            "0-9 and '-' before .toml"
        )
    with capture_of(arguments.source, "calibrate") as capture:
        found = _read(capture)
    windows = [message for message in found if isinstance(message, MetricWindow)]
    jobs = [message for message in found if isinstance(message, Job)]
    if not windows and not is_file_name(arguments.source):
        raise CommandError(
            f"no metric window of {arguments.source} is kept: a collector must run beside the job (`dynamix up`), and "
            f"FEED keeps {FEED.max_age_s / 3600:g} hours"
        )
    if not jobs:
        raise CommandError(f"{path} has no specification of the job: capture the job again")
    try:
        calibration = calibrate(windows, jobs[-1], arguments.workload, name)
    except ValueError as error:
        raise CommandError(f"{arguments.source}: {error}") from error
    is_shown = arguments.json != STANDARD_OUTPUT
    if is_shown:
        _show(calibration)
    if arguments.output:
        comment = (
            f"Fitted to {calibration.num_windows} windows of {path.name}; step times are off by "
            f"{calibration.median_error:.1%} in the median."
        )
        write_file(arguments.output, scenario_text(calibration.scenario, comment).encode())
        if is_shown:
            print(f"Scenario: {arguments.output}; try it: dynamix simulate {arguments.output}")
    write_json(calibration, arguments.json)
    return 0


def _read(path: Path) -> list[Message]:
    """Specifications and windows in a capture; of one that is cut off or damaged, in the intact part."""
    with reading(path), explained(CaptureError), CaptureReader(path) as reader:
        try:
            found = [
                decode_any(record.subject, record.payload)
                for record in reader
                if subjects.parse(record.subject).kind in ("job", "window")
            ]
        except ValueError as error:  # of a subject or a message
            raise CommandError(f"{path.name} holds what cannot be decoded: {error}") from error
    if reader.fault is not None:
        print(f"{reader.fault}; going on with what is good", file=sys.stderr)
    return found


def _show(calibration: "Calibration") -> None:
    """Print tables and remarks."""
    print("Time of a step = overhead + max(samples, saturation) / rate")
    rows = []
    for rank, speed in enumerate(calibration.ranks):
        rate, overhead, saturation = f"{speed.samples_per_s:.1f}", "not known", "none seen"
        if speed.samples_per_s_error is not None and speed.overhead_error_s is not None:
            rate = f"{rate} ± {speed.samples_per_s_error:.1f}"
            overhead = f"{speed.overhead_s * 1000:.2f} ± {speed.overhead_error_s * 1000:.2f}"
        if speed.saturation_error is not None:
            saturation = f"{speed.saturation:.0f} ± {speed.saturation_error:.1f}"
        rows.append((str(rank), rate, overhead, saturation))
    print_table(("rank", "samples/s", "overhead, ms", "saturation, samples"), rows)
    scenario = calibration.scenario
    network, stragglers, congestion = scenario.network, scenario.stragglers, scenario.congestion
    print(
        f"Communication: {calibration.communication_s * 1000:.2f} ms a step ({network.bandwidth_mbit_s:g} Mbit/s, "
        f"latency {network.latency_s * 1e6:.0f} us), overlap {network.overlap:g}, {network.num_buckets} buckets"
    )
    if stragglers is not None:
        print(f"Jitter: {stragglers.jitter:.1%} of a step's compute time")
        if stragglers.factor > 1:
            print(
                f"Stragglers: {stragglers.factor:g} times slower for {stragglers.mean_slow_s:g} s, "
                f"every {stragglers.mean_normal_s + stragglers.mean_slow_s:g} s and rank"
            )
    if congestion is not None:
        print(
            f"Congestion: {congestion.factor:g} times less bandwidth for {congestion.mean_congested_s:g} s, "
            f"every {congestion.mean_clear_s + congestion.mean_congested_s:g} s"
        )
    print(
        f"Virtual step times of {calibration.num_windows} windows ({calibration.num_left_out} left out): off by "
        f"{calibration.median_error:.1%} in the median, {calibration.p90_error:.1%} at the 90th percentile"
    )
    for remark in calibration.remarks:
        print(f"- {remark}")
