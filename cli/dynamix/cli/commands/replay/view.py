"""An outcome for reading: the verdict, what was compared, the first difference field by field."""

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from dynamix.cli.formatting import sizes_text
from dynamix.cli.tables import console_for, new_table, print_lines
from dynamix.recording.comparison import Difference, FieldPair
from dynamix.recording.decisions import PolicyComparison, WindowComparison
from dynamix.recording.replay import ReplayOutcome

MAX_FIELDS = 40
"""Differing fields that are shown."""
MAX_ALIKE = 12
"""Fields that are alike, for orientation."""
MAX_WINDOWS = 40
CONCERNED = {"collector": "windows, states and traces", "reward": "rewards", "arbitrator": "actions and events"}


def show_fingerprint(found: Sequence[str], *, to_stderr: bool) -> None:
    """Say what to expect, before the replay."""
    if found:
        expected = "captured by another build or processor: expect equal decisions, not equal bytes"
        print_lines(console_for(stderr=to_stderr), [expected, *(f"  {line}" for line in found)])


def show(outcome: ReplayOutcome, *, strict: bool, to_stderr: bool) -> None:
    """Print the verdict, what was compared, and the first difference."""
    console = console_for(stderr=to_stderr)
    print_lines(console, lines(outcome, strict=strict))
    first = outcome.counts.first_disagreeing or outcome.counts.first
    if outcome.what_if is not None:
        console.print(_windows(outcome.what_if))
    elif first is not None:
        print_lines(console, [_difference(first)])
        if first.fields:
            console.print(_fields(first.fields))


def lines(outcome: ReplayOutcome, *, strict: bool) -> Iterator[str]:
    """The outcome in sentences."""
    ratio = outcome.recorded_s / max(1e-9, outcome.wall_s)
    yield (
        f"{outcome.job} into the {outcome.into}: {outcome.num_records} messages of {outcome.recorded_s:.1f} s in "
        f"{outcome.wall_s:.2f} s, {ratio:.1f} times the recording's pace"
    )
    if outcome.cut_off:
        yield f"cut off: {outcome.cut_off}"
    yield from (f"note: {note}" for note in outcome.counts.notes)
    if outcome.interrupted:
        yield "interrupted: what follows is of the part before"
    yield from _compared(outcome, strict=strict) if outcome.what_if is None else _asked(outcome.what_if)


def _compared(outcome: ReplayOutcome, *, strict: bool) -> Iterator[str]:
    counts, what = outcome.counts, CONCERNED[outcome.into]
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
    if counts.differing:
        named = [f"{window} ({kind})" for _, window, kind in counts.differing[:12]]
        more = " ..." if counts.num_agreeing + counts.num_different > len(named) else ""
        yield f"windows that differ: {', '.join(named)}{more}"


def _asked(comparison: PolicyComparison) -> Iterator[str]:
    yield (
        f"{comparison.policy} (version {comparison.policy_version}) would have decided otherwise in "
        f"{comparison.num_windows_different} of {comparison.num_windows} windows: {comparison.mean_difference:.1f} "
        f"samples a rank on average, {comparison.p95_difference:.1f} at the 95th percentile; its global batch is "
        f"{comparison.mean_global_batch_size_ratio:.2f} times the recorded one"
    )
    yield "open loop: it saw what was recorded, not what its own sizes would have led to"


def _windows(comparison: PolicyComparison) -> Table:
    """Windows that differ, else the first ones."""
    sizes = ("recorded sizes", "its sizes")
    headings = ("window", "recorded batch", "its batch", "change", "a rank, mean", *sizes)
    chosen = [row for row in comparison.windows if row.recorded != row.other] or comparison.windows
    several = len({row.generation for row in comparison.windows}) > 1
    table = new_table(*headings, rows=[_cells(row, several=several) for row in chosen[:MAX_WINDOWS]], left=sizes)
    if len(chosen) > MAX_WINDOWS:
        table.caption = f"{len(chosen) - MAX_WINDOWS} more: --json FILE has all"
    return table


def _cells(row: WindowComparison, *, several: bool) -> tuple[str, ...]:
    recorded, other = sum(row.recorded), sum(row.other)
    return (
        f"{row.generation}:{row.window}" if several else str(row.window),
        str(recorded),
        str(other),
        f"{100 * (other / max(1, recorded) - 1):+.1f} %",
        f"{row.mean_difference:.1f}",
        sizes_text(row.recorded),
        sizes_text(row.other),
    )


def _difference(first: Difference) -> str:
    at = "" if first.sequence is None else f", recorded at {first.sequence}"
    byte = "" if first.first_byte is None else f"; the first other byte is the {first.first_byte}th, from 0"
    return f"first difference: {first.kind} for {first.key} ({first.subject}{at}): {first.reason}{byte}"


def _fields(pairs: Sequence[FieldPair]) -> Table:
    """What differs, highlighted, among some of what does not."""
    headings = ("", "field", "recorded", "replayed")
    differing = [pair for pair in pairs if pair.differs]
    alike = [pair for pair in pairs if not pair.differs]
    shown = {id(pair) for pair in [*differing[:MAX_FIELDS], *alike[:MAX_ALIKE]]}
    table = new_table(*headings, rows=[_row(pair) for pair in pairs if id(pair) in shown], left=headings)
    left = len(pairs) - len(shown)
    if left or not differing:
        more = f"{len(differing)} fields differ, {len(alike)} are alike; {left} are not shown"
        table.caption = more if differing else f"{more}: only the encoding differs"
    return table


def _row(pair: FieldPair) -> list[Text]:
    cells = ("!=" if pair.differs else "", pair.field, pair.recorded, pair.replayed)
    return [Text(cell, "bold red" if pair.differs else "dim") for cell in cells]
