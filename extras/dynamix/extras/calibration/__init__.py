"""Fit a virtual cluster to a real job: its metric windows become a scenario file.

  dynamix calibrate JOB --workload fashion-14-cnn -o mine.toml --png mine.png

SOURCE is a job on the bus, or a capture of one (`dynamix capture JOB -o FILE`). The local batch sizes should have
varied: run the job with `--policy random`. Each window's virtual step time comes from a fit on the other windows.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dynamix.cli.arguments import (
    STANDARD_OUTPUT,
    add_json_argument,
    add_option,
    add_output_argument,
    add_png_argument,
    number,
)
from dynamix.cli.connection import connected, find
from dynamix.cli.errors import CommandError, MisuseError, explained, reading
from dynamix.cli.jobs import check_job, find_job
from dynamix.cli.output import SCENARIO, write_file, write_json
from dynamix.cli.terminal import print_table
from dynamix.recording.capture import CaptureError, CaptureReader
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Job, Message, MetricWindow
from dynamix.schemas.streams import FEED

if TYPE_CHECKING:
    from .calibrate import Calibration, RankSpeed


BAND = 0.1
"""Drawn around the diagonal, relative."""


class CalibrationInput(NamedTuple):
    """The input of calibration: one job's windows."""

    job: Job | None
    """Its newest specification."""
    windows: list[MetricWindow]


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
    what = "optimizer of the virtual cluster (default: of the job's family)"
    parser.add_argument("--optimizer", choices=("sgd", "adam", "adamw"), help=what)
    add_option(parser, "--learning-rate", 0.05, "learning rate of the virtual cluster")
    parser.add_argument(
        "--target", type=number(0, 1, above=True), help="validation accuracy (default: the best that the job reported)"
    )
    add_option(parser, "--topology", "ring", "topology of the virtual cluster", choices=("ring", "parameter-server"))
    add_option(parser, "--servers", 1, "number of parameter servers")
    add_json_argument(parser)
    add_png_argument(parser, "draw virtual and real step times")


def run(arguments: argparse.Namespace) -> int:
    """Read the job, fit the cluster, and write the results."""
    from .calibrate import CalibrationSettings, calibrate

    path, name = Path(arguments.source), Path(arguments.output or "calibrated").stem
    if not subjects.is_token(name):
        raise MisuseError(
            f"--output {arguments.output}: the scenario gets the name of the file: use 1 to 63 of the characters a-z, "
            "0-9 and '-' before .toml"
        )
    if arguments.topology == "ring" and arguments.servers != 1:
        raise MisuseError(
            f"--servers {arguments.servers}: a ring has none, add --topology parameter-server or leave it out"
        )
    found = from_capture(path) if path.exists() and not path.is_dir() else asyncio.run(_from_bus(arguments.source))
    settings = CalibrationSettings(
        workload=arguments.workload,
        name=name,
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
    if arguments.json != STANDARD_OUTPUT:
        _show(calibration)
    _write_files(arguments, calibration)
    write_json(calibration, arguments.json)
    return 0


async def _from_bus(wanted: str) -> CalibrationInput:
    check_job(wanted, or_file=True)
    async with connected(find(os.environ), "calibrate") as bus:
        return await from_bus(bus, wanted)


def from_capture(path: Path) -> CalibrationInput:
    """Read a capture; of one that is cut off or damaged, the intact part."""
    with reading(path), explained(CaptureError), CaptureReader(path) as reader:
        try:
            found = [
                decode_any(record.subject, record.payload)
                for record in reader
                if subjects.parse(record.subject).kind in ("job", "window")
            ]
        except ValueError as error:  # of a subject or a message
            raise CommandError(f"{path} holds what cannot be decoded: {error}") from error
    if reader.fault is not None:
        print(f"{reader.fault}; going on with what is good", file=sys.stderr)
    return _sorted_out(found)


async def from_bus(bus: Bus, wanted: str) -> CalibrationInput:
    """Read the stored messages of the job with the id `wanted`, or of the only one whose id begins so."""
    job = await find_job(bus, wanted)
    subject = subjects.of("window", job.job, subjects.ANY)
    if await bus.last(FEED.name, subject) is None:
        raise CommandError(
            f"no metric window of {job.job} is kept: a collector must run beside the job (`dynamix up`), and FEED "
            f"keeps {FEED.max_age_s / 3600:g} hours"
        )
    found: list[Message] = [job]
    async with bus.consume(FEED.name, [subject], start="all") as consumer:
        async for batch in consumer:
            try:
                found += [decode_any(message.subject, message.payload) for message in batch]
            except MalformedMessageError as error:
                raise CommandError(f"the bus keeps of {job.job} what cannot be decoded: {error}") from error
            if batch[-1].num_pending == 0:
                break
    return _sorted_out(found)


def _sorted_out(messages: Sequence[Message]) -> CalibrationInput:
    jobs = [message for message in messages if isinstance(message, Job)]
    windows = [message for message in messages if isinstance(message, MetricWindow)]
    return CalibrationInput(jobs[-1] if jobs else None, windows)


def _write_files(arguments: argparse.Namespace, calibration: "Calibration") -> None:
    from .calibrate import scenario_text

    def say(text: str) -> None:
        if arguments.json != STANDARD_OUTPUT:
            print(text)

    if arguments.output:
        comment = (
            f"Fitted to {calibration.num_windows} windows of {Path(arguments.source).name}; step times are off by "
            f"{calibration.median_error:.1%} in the median."
        )
        write_file(arguments.output, scenario_text(calibration.scenario, (comment,)).encode())
        say(f"Scenario: {arguments.output}; try it: dynamix simulate {arguments.output}")
    if arguments.png:
        _draw(calibration, arguments.source, arguments.png)
        say(f"Picture: {arguments.png}")


def _show(calibration: "Calibration") -> None:
    """Print tables and remarks."""
    print("Time of a step = overhead + max(samples, saturation) / rate")
    rows = [(str(rank.rank), _rate(rank), _overhead(rank), _saturation(rank)) for rank in calibration.ranks]
    print_table(("rank", "samples/s", "overhead, ms", "saturation, samples"), rows)
    print(*_lines(calibration), *(f"- {remark}" for remark in calibration.remarks), sep="\n")


def _rate(rank: "RankSpeed") -> str:
    error = "" if rank.samples_per_s_error is None else f" ± {rank.samples_per_s_error:.1f}"
    return f"{rank.samples_per_s:.1f}{error}"


def _overhead(rank: "RankSpeed") -> str:
    if rank.overhead_error_s is None:
        return "not known"
    return f"{rank.overhead_s * 1000:.2f} ± {rank.overhead_error_s * 1000:.2f}"


def _saturation(rank: "RankSpeed") -> str:
    return "none seen" if rank.saturation_error is None else f"{rank.saturation:.0f} ± {rank.saturation_error:.1f}"


def _lines(calibration: "Calibration") -> Iterator[str]:
    scenario = calibration.scenario
    network, stragglers, congestion = scenario.network, scenario.stragglers, scenario.congestion
    yield (
        f"Communication: {calibration.communication_s * 1000:.2f} ms a step ({network.topology}, "
        f"{network.bandwidth_mbit_s:g} Mbit/s, latency {network.latency_s * 1e6:.0f} us), overlap {network.overlap:g}, "
        f"{network.num_buckets} buckets"
    )
    if stragglers is not None:
        yield f"Jitter: {stragglers.jitter:.1%} of a step's compute time"
        if stragglers.factor > 1:
            yield (
                f"Stragglers: {stragglers.factor:g} times slower for {stragglers.mean_slow_s:g} s, "
                f"every {stragglers.mean_normal_s + stragglers.mean_slow_s:g} s and rank"
            )
    if congestion is not None:
        yield (
            f"Congestion: {congestion.factor:g} times less bandwidth for {congestion.mean_congested_s:g} s, "
            f"every {congestion.mean_clear_s + congestion.mean_congested_s:g} s"
        )
    yield (
        f"Virtual step times of {calibration.num_windows} windows ({calibration.num_left_out} left out): off by "
        f"{calibration.median_error:.1%} in the median, {calibration.p90_error:.1%} at the 90th percentile"
    )
    if (median := calibration.steady_median_error) is not None and (p90 := calibration.steady_p90_error) is not None:
        yield f"of undisturbed windows: {median:.1%} and {p90:.1%}"


def _draw(calibration: "Calibration", source: str, path: str) -> None:
    """Write a PNG: virtual and real step times, window by window and against each other."""
    from matplotlib.figure import Figure

    from dynamix.cli.figures import COLOURS, finish, save

    figure = Figure(figsize=(12, 5), layout="constrained")
    over_windows, against = figure.subplots(1, 2, width_ratios=(1.6, 1))
    windows = [comparison.window for comparison in calibration.comparisons]
    real = [comparison.step_time_s * 1000 for comparison in calibration.comparisons]
    virtual = [comparison.virtual_step_time_s * 1000 for comparison in calibration.comparisons]
    over_windows.plot(windows, real, color=COLOURS[0], label="real", linewidth=1.5)
    over_windows.plot(windows, virtual, color=COLOURS[3], label="virtual, fitted to other windows", linewidth=1)
    finish(over_windows, title="Step time, mean of each window", xlabel="window", ylabel="ms")
    for disturbed in (False, True):
        chosen = [c for c in calibration.comparisons if bool(c.slow_ranks or c.is_congested) == disturbed]
        against.scatter(
            [comparison.step_time_s * 1000 for comparison in chosen],
            [comparison.virtual_step_time_s * 1000 for comparison in chosen],
            s=14,
            color=COLOURS[4] if disturbed else COLOURS[0],
            label="a rank straggled, or congestion" if disturbed else "undisturbed",
        )
    most = max(max(c.step_time_s, c.virtual_step_time_s) for c in calibration.comparisons) * 1050
    against.plot([0, most], [0, most], color="black", linewidth=0.8)
    for factor in (1 - BAND, 1 + BAND):
        against.plot([0, most], [0, factor * most], color="black", linewidth=0.6, linestyle=":")
    finish(against, title=f"Virtual against real, ±{BAND:.0%} dotted", xlabel="real, ms", ylabel="virtual, ms")
    against.set_xlim(0, most)
    against.set_ylim(0, most)
    figure.suptitle(
        f"{source}: virtual step times are off by {calibration.median_error:.1%} in the median, "
        f"{calibration.p90_error:.1%} at the 90th percentile ({calibration.num_windows} windows)"
    )
    save(figure, path)
