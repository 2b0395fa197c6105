"""Replay a capture: give a service's functions the recorded inputs, and compare each output byte for byte.

  dynamix replay FILE                              into the arbitrator
  dynamix replay FILE --into collector

It shows the first difference field by field. Settings are read from DYNAMIX_COLLECTOR_... and DYNAMIX_REWARD_...

Exit codes: 0 equal; 1 different, or not every recorded output was compared; 2 it cannot be replayed; 130 interrupted.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dynamix.cli.arguments import STANDARD_OUTPUT, add_json_argument, add_list, add_option
from dynamix.cli.errors import CommandError, explained, reading
from dynamix.cli.output import write_json
from dynamix.cli.terminal import ProgressLine, print_table
from dynamix.collector.observation import CollectorSettings
from dynamix.recording.capture import CaptureError, read_header
from dynamix.recording.fingerprint import differences, fingerprint
from dynamix.recording.replay import ReplayError, ReplayOutcome, replay
from dynamix.reward.service import RewardSettings
from dynamix.runtime.settings import load

EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2
MAX_FIELDS = 40
"""Differing fields that are shown."""
CONCERNED = {"collector": "windows, states and traces", "reward": "rewards", "arbitrator": "actions"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("file", metavar="FILE", help="a capture, written by `dynamix capture JOB -o FILE`")
    services = ("collector", "reward", "arbitrator")
    add_option(parser, "--into", "arbitrator", "the service whose outputs are computed again", choices=services)
    add_list(parser, "--policy-file", "PATH", "a learned policy that is not in the package; may be repeated")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replay and show the result; the exit code is 0 when it is equal."""
    unusable = explained(CaptureError, ReplayError, ValueError, exit_code=UNUSABLE)
    with unusable, reading(arguments.file, exit_code=UNUSABLE):
        path = Path(arguments.file)
        if found := differences(read_header(path).fingerprint, fingerprint()):
            expected = "captured by another build or processor: expect equal decisions, not equal bytes"
            print(expected, *(f"  {line}" for line in found), sep="\n", file=sys.stderr)
        with ProgressLine() as progress:
            progress.write_line(f"replaying {path} into the {arguments.into}")
            outcome = replay(
                path,
                arguments.into,
                policy_files=[Path(file) for file in arguments.policy_file],
                collector=load("collector", CollectorSettings, []).own,
                reward=load("reward", RewardSettings, []).own,
                on_progress=lambda num_records, recorded_s: progress.show(
                    f"{num_records} messages, {recorded_s:.0f} s of the recording"
                ),
            )
    if arguments.json != STANDARD_OUTPUT:
        print(*lines(outcome), sep="\n")
        if listed := outcome.counts.differences:  # the first one field by field
            first = next((one for one in listed if not one.agrees), listed[0])
            at = "" if first.sequence is None else f", recorded at {first.sequence}"
            print(f"first difference: {first.kind} for {first.key} ({first.subject}{at}): {first.reason}")
            if first.fields:
                headings = ("field", "recorded", "replayed")
                rows = [(name, *pair) for name, pair in first.fields.items()][:MAX_FIELDS]
                more = len(first.fields) - len(rows)
                print_table(headings, rows, left=headings, caption=f"{more} more fields differ" if more else "")
    equal = outcome.is_equal()
    document = {
        "equal": equal,
        "bytes_equal": outcome.bytes_equal,
        "decisions_equal": not outcome.counts.num_different,
        **msgspec.to_builtins(outcome),
    }
    with explained(CommandError, exit_code=UNUSABLE):  # 1 means that something differs
        write_json(document, arguments.json)
    return EQUAL if equal else DIFFERENT


def lines(outcome: ReplayOutcome) -> Iterator[str]:
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
    verdict = "EQUAL" if outcome.is_equal() else "DIFFERENT"
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
