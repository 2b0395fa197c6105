"""Replay a capture: give a service's functions the recorded inputs, and compare each output byte for byte.

  dynamix replay FILE                              into the arbitrator, as fast as it goes
  dynamix replay FILE --into reward
  dynamix replay FILE --into collector --speed original
  dynamix replay FILE --policy rule --policy-option noise_multiplier=2

The first difference is shown field by field. With another policy it says what that would have decided here. The
services' own settings are read from DYNAMIX_COLLECTOR_... and DYNAMIX_REWARD_... as the services read them.

0: equal, or a policy was asked; 1: different, or not every recorded output was compared; 2: it cannot be replayed;
130: interrupted.
"""

import argparse
import asyncio
import time
from pathlib import Path

import msgspec

from dynamix.cli.errors import INTERRUPTED, CommandError, explained, reading
from dynamix.cli.output import STANDARD_OUTPUT, Document, add_json_argument, add_list, add_option, write_json
from dynamix.cli.progress import ProgressLine, stop_event
from dynamix.collector.observation import CollectorSettings
from dynamix.recording.capture import (
    CaptureError,
    WindowKey,
    differences,
    fingerprint,
    first_generation,
    read_header,
)
from dynamix.recording.decisions import OtherPolicy
from dynamix.recording.playback import Player, ReplayError
from dynamix.recording.replay import ReplayOutcome, ReplayRequest, replay
from dynamix.reward.service import RewardSettings
from dynamix.runtime.settings import load
from dynamix.schemas.messages.policy_options import option_value

EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("file", metavar="FILE", help="a capture: `dynamix capture JOB -o FILE` makes one")
    services = ("collector", "reward", "arbitrator")
    add_option(parser, "--into", "arbitrator", "the service whose outputs are made again", choices=services)
    add_option(parser, "--speed", "max", "the recording's pace or none", choices=("original", "max"))
    parser.add_argument("--until", metavar="WINDOW", help="the last window, as N or GENERATION:N (default: all)")
    parser.add_argument("--policy", metavar="NAME", help="ask another policy what it would have decided")
    what = "of that policy, or of the recorded one asked again; may be given again"
    add_list(parser, "--policy-option", "NAME=VALUE", what)
    add_list(parser, "--policy-file", "PATH", "a learned policy that is not in the package; may be given again")
    parser.add_argument("--strict", action="store_true", help="other bytes are a difference on any build and processor")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replay and show; the exit code says equal or not."""
    from . import view

    to_stderr, strict = arguments.json == STANDARD_OUTPUT, arguments.strict
    unusable = explained(CaptureError, ReplayError, ValueError, exit_code=UNUSABLE)
    with unusable, reading(arguments.file, exit_code=UNUSABLE):
        request = _request(arguments)
        found = differences(read_header(request.path).fingerprint, fingerprint())
        view.show_fingerprint(found, to_stderr=to_stderr)
        outcome = asyncio.run(_replayed(request))
    view.show(outcome, strict=strict, to_stderr=to_stderr)
    with explained(CommandError, exit_code=UNUSABLE):  # 1 means that something differs
        write_json(_document(outcome, strict=strict), arguments.json)
    if outcome.interrupted:
        return INTERRUPTED
    return EQUAL if outcome.what_if is not None or outcome.is_equal(strict=strict) else DIFFERENT


def _document(outcome: ReplayOutcome, *, strict: bool) -> Document:
    """All of it; `equal` is what the exit code says, `null` where another policy was asked or it was interrupted."""
    asked = outcome.what_if is not None or outcome.interrupted
    return {
        "equal": None if asked else outcome.is_equal(strict=strict),
        "bytes_equal": None if asked else outcome.bytes_equal,
        "decisions_equal": None if asked else outcome.decisions_equal,
        "times_real_time": outcome.recorded_s / outcome.wall_s if outcome.wall_s > 0 else None,
        **msgspec.to_builtins(outcome),
    }


def _request(arguments: argparse.Namespace) -> ReplayRequest:
    path, options = Path(arguments.file), dict(_option(text) for text in arguments.policy_option)
    asks_another = arguments.policy is not None or bool(options)
    if asks_another and arguments.into != "arbitrator":
        raise CommandError(f"--policy asks the arbitrator, not the {arguments.into}", exit_code=UNUSABLE)
    return ReplayRequest(
        path=path,
        into=arguments.into,
        speed=arguments.speed,
        until=None if arguments.until is None else _window_key(path, arguments.until),
        other=OtherPolicy(arguments.policy, options) if asks_another else None,
        policy_files=tuple(Path(file) for file in arguments.policy_file),
        collector=load("collector", CollectorSettings, []).own,
        reward=load("reward", RewardSettings, []).own,
    )


def _option(text: str) -> tuple[str, float | str]:
    name, _, value = text.partition("=")
    if not value:
        raise CommandError(f"--policy-option {text!r}: write NAME=VALUE", exit_code=UNUSABLE)
    return name, option_value(value)


def _window_key(path: Path, text: str) -> WindowKey:
    generation, separator, window = text.rpartition(":")
    if not window.isdecimal() or (separator and not generation.isdecimal()):
        raise CommandError(f"--until {text}: write a window as N or GENERATION:N", exit_code=UNUSABLE)
    return WindowKey(int(generation) if separator else first_generation(path), int(window))


async def _replayed(request: ReplayRequest) -> ReplayOutcome:
    with stop_event() as stop, ProgressLine() as progress:
        progress.write_line(f"replaying {request.path} into the {request.into}")
        begun_s = time.monotonic()

        def show(player: Player) -> None:
            pace = player.recorded_s / max(1e-9, time.monotonic() - begun_s)
            progress.show(
                f"{player.num_records} messages, {player.recorded_s:.0f} s of the recording, {pace:.1f} times its pace"
            )

        return await replay(request, stop=stop, on_progress=show)
