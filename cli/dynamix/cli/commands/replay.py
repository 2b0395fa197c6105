"""Replay a capture: give a service's functions the recorded inputs, and compare each output byte for byte.

  dynamix replay FILE                              into the arbitrator
  dynamix replay FILE --into collector
  dynamix replay FILE --policy rule --policy-option noise_multiplier=2

It shows the first difference field by field. With another policy it shows what that policy would have decided. Settings
are read from DYNAMIX_COLLECTOR_... and DYNAMIX_REWARD_...

Exit codes: 0 equal, or another policy was asked; 1 different, or not every recorded output was compared; 2 it cannot be
replayed; 130 interrupted.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dynamix.cli.arguments import STANDARD_OUTPUT, add_json_argument, add_list, add_option, window_key
from dynamix.cli.errors import CommandError, explained, reading
from dynamix.cli.output import write_json
from dynamix.cli.terminal import ProgressLine, print_table, sizes_text
from dynamix.collector.observation import CollectorSettings
from dynamix.recording.capture import (
    CaptureError,
    WindowKey,
    first_generation,
    read_header,
)
from dynamix.recording.decisions import OtherPolicy, PolicyComparison, ReplayError
from dynamix.recording.fingerprint import differences, fingerprint
from dynamix.recording.replay import ReplayOutcome, replay
from dynamix.reward.service import RewardSettings
from dynamix.runtime.settings import load
from dynamix.schemas.policies import option_value

EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2
MAX_FIELDS = 40
"""Differing fields that are shown."""
MAX_WINDOWS = 40
CONCERNED = {"collector": "windows, states and traces", "reward": "rewards", "arbitrator": "actions"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("file", metavar="FILE", help="a capture, written by `dynamix capture JOB -o FILE`")
    services = ("collector", "reward", "arbitrator")
    add_option(parser, "--into", "arbitrator", "the service whose outputs are computed again", choices=services)
    what = "the last window, as N or GENERATION:N (default: all)"
    parser.add_argument("--until", metavar="WINDOW", type=window_key, help=what)
    parser.add_argument("--policy", metavar="NAME", help="show what another policy would have decided")
    what = "of that policy, or of the recorded one asked again; may be given again"
    add_list(parser, "--policy-option", "NAME=VALUE", what)
    add_list(parser, "--policy-file", "PATH", "a learned policy that is not in the package; may be repeated")
    parser.add_argument("--strict", action="store_true", help="require equal bytes on any build and processor")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replay and show the result; the exit code is 0 when it is equal."""
    unusable = explained(CaptureError, ReplayError, ValueError, exit_code=UNUSABLE)
    with unusable, reading(arguments.file, exit_code=UNUSABLE):
        path = Path(arguments.file)
        if found := differences(read_header(path).fingerprint, fingerprint()):
            expected = "captured by another build or processor: expect equal decisions, not equal bytes"
            print(expected, *(f"  {line}" for line in found), sep="\n", file=sys.stderr)
        outcome = _replayed(path, arguments)
    if arguments.json != STANDARD_OUTPUT:
        _show(outcome, strict=arguments.strict)
    asked, equal = outcome.what_if is not None, outcome.is_equal(strict=arguments.strict)
    document = {
        "equal": None if asked else equal,
        "bytes_equal": None if asked else outcome.bytes_equal,
        "decisions_equal": None if asked else outcome.decisions_equal,
        **msgspec.to_builtins(outcome),
    }
    with explained(CommandError, exit_code=UNUSABLE):  # 1 means that something differs
        write_json(document, arguments.json)
    return EQUAL if asked or equal else DIFFERENT


def _replayed(path: Path, arguments: argparse.Namespace) -> ReplayOutcome:
    options = {}
    for text in arguments.policy_option:
        name, _, value = text.partition("=")
        if not value:
            raise CommandError(f"--policy-option {text!r}: write NAME=VALUE", exit_code=UNUSABLE)
        options[name] = option_value(value)
    until = None
    if arguments.until is not None:
        generation, window = arguments.until
        until = WindowKey(first_generation(path) if generation is None else generation, window)
    asks_another = arguments.policy is not None or bool(options)
    if asks_another and arguments.into != "arbitrator":
        raise CommandError(f"--policy asks the arbitrator, not the {arguments.into}", exit_code=UNUSABLE)
    with ProgressLine() as progress:
        progress.write_line(f"replaying {path} into the {arguments.into}")
        return replay(
            path,
            arguments.into,
            until=until,
            other=OtherPolicy(arguments.policy, options) if asks_another else None,
            policy_files=[Path(file) for file in arguments.policy_file],
            collector=load("collector", CollectorSettings, []).own,
            reward=load("reward", RewardSettings, []).own,
            on_progress=lambda num_records, recorded_s: progress.show(
                f"{num_records} messages, {recorded_s:.0f} s of the recording"
            ),
        )


def _show(outcome: ReplayOutcome, *, strict: bool) -> None:
    """Print the outcome in sentences; then the first difference field by field, or what another policy decided."""
    print(*lines(outcome, strict=strict), sep="\n")
    if outcome.what_if is not None:
        _print_windows(outcome.what_if)
    elif listed := outcome.counts.differences:
        first = next((one for one in listed if not one.agrees), listed[0])
        at = "" if first.sequence is None else f", recorded at {first.sequence}"
        print(f"first difference: {first.kind} for {first.key} ({first.subject}{at}): {first.reason}")
        if first.fields:
            headings = ("field", "recorded", "replayed")
            rows = [(name, *pair) for name, pair in first.fields.items()][:MAX_FIELDS]
            more = len(first.fields) - len(rows)
            print_table(headings, rows, left=headings, caption=f"{more} more fields differ" if more else "")


def lines(outcome: ReplayOutcome, *, strict: bool) -> Iterator[str]:
    """The outcome in sentences."""
    ratio = outcome.recorded_s / max(1e-9, outcome.wall_s)
    yield (
        f"{outcome.job} into the {outcome.into}: {outcome.num_records} messages of {outcome.recorded_s:.1f} s in "
        f"{outcome.wall_s:.2f} s, {ratio:.1f} times the recording's pace"
    )
    if outcome.cut_off:
        yield f"cut off: {outcome.cut_off}"
    counts, what = outcome.counts, CONCERNED[outcome.into]
    yield from (f"note: {note}" for note in counts.notes)
    if (asked := outcome.what_if) is not None:
        yield (
            f"{asked.policy} (version {asked.policy_version}) would have decided otherwise in "
            f"{asked.num_windows_different} of {asked.num_windows} windows: {asked.mean_difference:.1f} samples a rank "
            f"on average, {asked.p95_difference:.1f} at the 95th percentile; its global batch is "
            f"{asked.mean_global_batch_size_ratio:.2f} times the recorded one"
        )
        yield "open loop: it saw what was recorded, not what its own sizes would have led to"
        return
    verdict = "EQUAL" if outcome.is_equal(strict=strict) else "DIFFERENT"
    if counts.num_uncompared and not counts.num_different:
        verdict = "INCOMPLETE"
    yield (
        f"{verdict}: of {counts.num_compared} {what} {counts.num_equal} are equal byte for "
        f"byte, {counts.num_agreeing} in what they say only, {counts.num_different} differ or are missing"
    )
    if counts.num_repeated:
        yield f"{counts.num_repeated} were recorded twice"
    if counts.num_uncompared:
        yield (
            f"{counts.num_uncompared} recorded {what} were not compared: what they follow from is not in the capture, "
            "or cannot be decoded"
        )
    if counts.num_outside:
        yield f"{counts.num_outside} replayed ones have no counterpart: the capture ends about there"
    if counts.differences:
        named = [f"{one.window} ({one.kind})" for one in counts.differences[:12]]
        more = " ..." if counts.num_agreeing + counts.num_different > len(named) else ""
        yield f"windows that differ: {', '.join(named)}{more}"


def _print_windows(comparison: PolicyComparison) -> None:
    """Print windows that differ, else the first ones."""
    sizes = ("recorded sizes", "its sizes")
    headings = ("window", "recorded batch", "its batch", "a rank, mean", *sizes)
    chosen = [row for row in comparison.windows if row.recorded != row.other] or comparison.windows
    rows = [
        (
            f"{row.generation}:{row.window}",
            *(str(sum(row.recorded)), str(sum(row.other)), f"{row.mean_difference:.1f}"),
            *(sizes_text(row.recorded), sizes_text(row.other)),
        )
        for row in chosen[:MAX_WINDOWS]
    ]
    caption = f"{len(chosen) - MAX_WINDOWS} more: --json FILE has all" if len(chosen) > MAX_WINDOWS else None
    print_table(headings, rows, left=sizes, caption=caption)
