"""Tables of a verdict: one per family, and the one over all heterogeneous families."""

from collections.abc import Sequence

from rich.table import Table

from dynamix.cli.formatting import UNKNOWN, formatted
from dynamix.cli.tables import console_for, new_table, print_lines
from dynamix.lab.comparison.verdict import RatioInterval, Verdict, VerdictFamily, VerdictRow

HEADINGS = (
    "median",
    "missed",
    "runs",
    "vs best static",
    "vs goodput",
    "at fixed time",
    "at equal samples",
    "test",
    "spread",
)


def show(verdict: Verdict, *, stderr: bool) -> None:
    """Print all tables, the most important last."""
    console = console_for(stderr=stderr)
    for name, family in verdict.families.items():
        console.print(_table(_family_title(name, family), family.policies, verdict.default_policy))
    names = ", ".join(verdict.heterogeneous_families) or "all families: none is heterogeneous"
    console.print(_table(f"Over {names}, each counted alike", verdict.policies, verdict.default_policy))
    console.print(_headline(verdict))
    for base in verdict.against:
        console.print(_against(verdict, base))
    missing = f" {verdict.num_runs_missing} runs are missing." if verdict.num_runs_missing else ""
    console.print(
        f"Time to target in virtual seconds, a miss counts as the time limit. Ratios: geometric mean of pairs of the "
        f"same scenario and seed, [95 % interval over {len(verdict.seeds)} seeds and the policy seeds] {{the same with "
        f"families as a sample of those there could be}}; below 1 is faster.{missing}",
        highlight=False,
    )
    for row in verdict.policies:
        notes = [row.note] if row.note and row.num_runs else []
        print_lines(console, [f"{row.policy}: {text}" for text in (*notes, *row.signatures)])


def _table(title: str, rows: Sequence[VerdictRow], default: str) -> Table:
    cells = [(f"{row.policy} (default)" if row.policy == default else row.policy, *_cells(row)) for row in rows]
    return new_table("policy", *HEADINGS, rows=cells, left=("policy",), title=title)


def _headline(verdict: Verdict) -> Table:
    """The default policy against each baseline, the control family counted like any other in the first column."""
    rows = [
        (row.against, _interval(row.all_families), _interval(row.heterogeneous), _interval(row.control))
        for row in verdict.headline
    ]
    columns = ("all families", "heterogeneous", "control")
    return new_table("against", *columns, rows=rows, left=("against",), title=f"{verdict.default_policy}: time over")


def _against(verdict: Verdict, base: str) -> Table:
    """Every row against one, by family, and over the heterogeneous ones."""
    rows = [
        (
            row.policy,
            *(_interval(_row(family.policies, row.policy).against[base]) for family in verdict.families.values()),
            _interval(row.against[base]),
        )
        for row in verdict.policies
    ]
    columns = (*verdict.families, "heterogeneous")
    return new_table("policy", *columns, rows=rows, left=("policy",), title=f"time over that of {base}")


def _row(rows: Sequence[VerdictRow], policy: str) -> VerdictRow:
    return next(row for row in rows if row.policy == policy)


def _cells(row: VerdictRow) -> tuple[str, ...]:
    if row.num_runs == 0:
        return (row.note or "no runs",)
    seeds = f" ({row.num_policy_seeds} policies)" if row.num_policy_seeds > 1 else ""
    return (
        f"{row.median_time_to_target_s:.1f} s",
        str(row.misses),
        f"{row.num_runs}{seeds}",
        _interval(row.vs_best_static),
        _interval(row.vs_goodput),
        formatted(row.accuracy_at_fixed_time, "{:.1%}"),
        formatted(row.accuracy_at_equal_samples, "{:.1%}"),
        formatted(row.test_accuracy, "{:.1%}"),
        formatted(row.relative_spread, "{:.0%}"),
    )


def _interval(found: RatioInterval | None) -> str:
    if found is None:
        return UNKNOWN
    if found.low is None or found.high is None:
        return f"{found.ratio:.2f}"
    families = "" if found.family_low is None else f" {{{found.family_low:.2f}, {found.family_high:.2f}}}"
    return f"{found.ratio:.2f} [{found.low:.2f}, {found.high:.2f}]{families}"


def _family_title(name: str, family: VerdictFamily) -> str:
    what = "control: homogeneous" if family.control else "heterogeneous"
    size = family.best_static_local_batch_size
    best = "" if size is None else f"; best static is {size} per rank, chosen on {family.chosen_on}"
    return f"{name} ({what}{best})"
