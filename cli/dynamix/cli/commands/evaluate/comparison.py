"""An evaluation: the runs that it takes, reasons to doubt its verdict, its tables; and the tuning of the baselines."""

import argparse
import itertools
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dynamix.cli.arguments import STANDARD_OUTPUT
from dynamix.cli.errors import INTERRUPTED, MisuseError, explained
from dynamix.cli.output import TUNED, write_file, write_json
from dynamix.cli.terminal import UNKNOWN, ProgressLine, duration, formatted, print_table
from dynamix.lab.comparison.figure import draw
from dynamix.lab.comparison.rows import (
    BEST_STATIC,
    GOODPUT,
    Row,
    Tuned,
    parse_rows,
    read_rows,
    read_tuned,
    to_toml,
    untuned_families,
    with_references,
)
from dynamix.lab.comparison.runs import ComparisonCell, Ledger, fill, plan
from dynamix.lab.comparison.tuning import FIRST_SEED, settings_of, tune
from dynamix.lab.comparison.verdict import Interval, Verdict, VerdictRow, judge, note_on
from dynamix.lab.simulator.episode import EpisodeError, code_digest
from dynamix.lab.simulator.scenario import (
    TRAIN,
    TUNED_EXCHANGE_FILE,
    TUNED_FILE,
    Suite,
    scenario_root,
    suite_named,
)
from dynamix.runtime import output_files

HEADINGS = ("median", "missed", "runs", "vs best static", "vs goodput", "at fixed time", "test")
HOW_TO_FIX = "run `dynamix evaluate tune`"


def shown_on(line: ProgressLine) -> Callable[[int, int, str], None]:
    """Shows the runs that are done, that are left, and the last one."""
    begun_s, number = time.monotonic(), itertools.count(1)

    def show_run(done: int, total: int, newest: str) -> None:
        passed_s = time.monotonic() - begun_s
        left_s = passed_s / next(number) * (total - done)
        line.show(f"{done}/{total} runs, {duration(passed_s)}, {duration(left_s)} left: {newest}", now=done == total)

    return show_run


def evaluate(arguments: argparse.Namespace) -> int:
    """Run the comparison and show the verdict; an interrupt shows what there is and returns 130."""
    exit_code = 0
    # the command that makes these numbers again, without options that do not change them
    which = ["--rows", arguments.rows] if arguments.rows else ["--policies", arguments.policies]
    which += ["--exchange", arguments.exchange] if arguments.exchange else []
    command = shlex.join(
        ["dynamix", "evaluate", "--scenarios", arguments.scenarios, *which, "--seeds", str(arguments.seeds)]
    )
    with explained(OSError, ValueError, EpisodeError):
        suite = suite_named(arguments.scenarios)
        asked = read_rows(Path(arguments.rows)) if arguments.rows else parse_rows(arguments.policies)
        rows = with_references(asked)
        if arguments.exchange is not None:
            rows = [row.permitted(arguments.exchange) for row in rows]
        tuned = read_tuned(Path(arguments.tuned) if arguments.tuned else scenario_root() / TUNED_FILE)
        of_exchanges = scenario_root() / TUNED_EXCHANGE_FILE
        if arguments.exchange is not None and not arguments.tuned and of_exchanges.exists():
            tuned = tuned.with_choices(read_tuned(of_exchanges))
        cells = plan(suite, rows, range(arguments.seeds), tuned)
        against = [row.label for row in asked if row.against]
        with Ledger(Path(arguments.results)) as ledger:
            with ProgressLine() as progress:
                for warning in _warnings(suite, rows, tuned, cells):
                    progress.write_line(warning)
                try:
                    fill(cells, ledger, jobs=arguments.jobs, data=arguments.data, on_progress=shown_on(progress))
                except KeyboardInterrupt:
                    progress.write_line("Interrupted: the verdict is on the finished runs; the same command continues.")
                    exit_code = INTERRUPTED
            verdict, table = judge(suite, rows, cells, ledger, tuned, command=command, against=against)
        if arguments.json != STANDARD_OUTPUT:
            show(verdict)
        write_json(verdict, arguments.json)
        if arguments.png is not None:
            drawn = [*suite.heterogeneous_families, *suite.families][0]
            draw(verdict, table, suite.families[drawn][0].name, Path(arguments.png))
    return exit_code


def _warnings(suite: Suite, rows: Sequence[Row], tuned: Tuned, cells: Sequence[ComparisonCell]) -> Iterator[str]:
    """Reasons why baselines may be worse than possible, and learned policies seem better than they are."""
    if tuned.scenarios != suite_named(TRAIN).digest:
        yield f"The train scenarios have changed since the baselines were tuned: {HOW_TO_FIX}."
    if tuned.code != code_digest():
        yield f"The code has changed since the baselines were tuned: {HOW_TO_FIX}."
    unfit = [scenario.name for scenario in suite.scenarios if not scenario.permits_any_exchange]
    if unfit and any(cell.task.setting.exchange for cell in cells):
        yield f"Workers of {', '.join(unfit)} support neither codecs nor local steps: training is exact there."
    tunable = {row.policy for exchange in (None, "local") for row in settings_of(exchange)} | {BEST_STATIC}
    for row in rows:
        families = untuned_families(row, suite.families, tuned)
        if families and row.policy in tunable:
            yield f"{row.label} is not tuned for {', '.join(families)} and runs with defaults: {HOW_TO_FIX}."
        if row.policy_files and (note := note_on(row, suite)):
            yield f"{row.label}: {note}"


# --- tables


def show(verdict: Verdict) -> None:
    """Print all tables, the most important last."""
    default = verdict.default_policy
    for name, family in verdict.families.items():
        what = "control: homogeneous" if family.control else "heterogeneous"
        size = family.best_static_local_batch_size
        best = "" if size is None else f"; best static is {size} per rank, chosen on {family.chosen_on}"
        _print_policies(f"{name} ({what}{best})", family.policies, default)
    names = ", ".join(verdict.heterogeneous_families) or "all families: none is heterogeneous"
    _print_policies(f"Over {names}, each counted alike", verdict.policies, default)
    # the default policy against each baseline, the control family counted like any other in the first column
    headline = [(base, *map(_interval, ratios.values())) for base, ratios in verdict.headline.items()]
    headings: tuple[str, ...] = ("against", *next(iter(verdict.headline.values())))
    print_table(headings, headline, left=("against",), title=f"{default}: time over")
    by_family = [{row.policy: row for row in family.policies} for family in verdict.families.values()]
    for base in verdict.against:
        rows = [
            (row.policy, *(_interval(one[row.policy].ratios[base]) for one in (*by_family, {row.policy: row})))
            for row in verdict.policies
        ]
        headings = ("policy", *verdict.families, "heterogeneous")
        print_table(headings, rows, left=("policy",), title=f"time over that of {base}")
    missing = f" {verdict.num_runs_missing} runs are missing." if verdict.num_runs_missing else ""
    about_ratios = (
        f"Time to target in virtual seconds, a miss counts as the time limit. Ratios: geometric mean of pairs of the "
        f"same scenario and seed, [95 % interval over {len(verdict.seeds)} seeds and the policy seeds] {{the same with "
        f"families as a sample of those there could be}}; below 1 is faster.{missing}"
    )
    notes = [about_ratios]
    for row in verdict.policies:
        about = [row.note] if row.note and row.num_runs else []
        notes += [f"{row.policy}: {text}" for text in (*about, *row.signatures)]
    print(*notes, sep="\n")


def _print_policies(title: str, rows: Sequence[VerdictRow], default: str) -> None:
    cells: list[tuple[str, ...]] = []
    for row in rows:
        name = f"{row.policy} (default)" if row.policy == default else row.policy
        if row.num_runs == 0:
            cells.append((name, row.note or "no runs", *[""] * (len(HEADINGS) - 1)))
            continue
        seeds = f" ({row.num_policy_seeds} policies)" if row.num_policy_seeds > 1 else ""
        values = (
            f"{row.median_time_to_target_s:.1f} s",
            str(row.misses),
            f"{row.num_runs}{seeds}",
            _interval(row.ratios[BEST_STATIC]),
            _interval(row.ratios[GOODPUT]),
            formatted(row.accuracy_at_fixed_time, "{:.1%}"),
            formatted(row.test_accuracy, "{:.1%}"),
        )
        cells.append((name, *values))
    print_table(("policy", *HEADINGS), cells, left=("policy",), title=title)


def _interval(found: Interval | None) -> str:
    if found is None:
        return UNKNOWN
    if found.low is None or found.high is None:
        return f"{found.value:.2f}"
    families = "" if found.family_low is None else f" {{{found.family_low:.2f}, {found.family_high:.2f}}}"
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]{families}"


# --- tuning


def tune_baselines(arguments: argparse.Namespace) -> int:
    """Run all settings and choose; an interrupt chooses nothing."""
    named = {name: value for name in ("scenarios", "rows", "exchange") if (value := getattr(arguments, name))}
    words = [word for name, value in named.items() for word in (f"--{name}", value)]
    output = Path(arguments.output or scenario_root() / (TUNED_EXCHANGE_FILE if arguments.exchange else TUNED_FILE))
    with explained(OSError, ValueError, EpisodeError):
        if not arguments.output:  # choices for some baselines, or on other scenarios, never replace those for all
            for option in named.keys() - {"exchange"}:
                what = f"{output} holds the choices for all baselines on the train scenarios"
                raise MisuseError(f"--{option} {named[option]}: {what}; name another file with -o")
            output_files.check(output, TUNED, force=arguments.force)
        suite = suite_named(arguments.scenarios or TRAIN)
        rows = read_rows(Path(arguments.rows)) if arguments.rows else settings_of(arguments.exchange)
        with Ledger(Path(arguments.results)) as ledger, ProgressLine() as progress:
            tuned = tune(
                suite,
                rows,
                ledger,
                seeds=range(FIRST_SEED, FIRST_SEED + arguments.seeds),
                exchange=arguments.exchange,
                command=shlex.join(["dynamix", "evaluate", "tune", *words, "--seeds", str(arguments.seeds)]),
                jobs=arguments.jobs,
                data=arguments.data,
                on_progress=shown_on(progress),
            )
        write_file(output, to_toml(tuned).encode())

    if arguments.json != STANDARD_OUTPUT:
        print(f"{output} has the best of {tuned.num_settings} settings each for {', '.join(tuned.overall)}")
    write_json(tuned, arguments.json)
    return 0
