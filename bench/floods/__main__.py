"""How long an honest job waits for its decisions while one client floods the broker.

`python -m bench.floods [--keys] [--flood NAME] [--json FILE]`, some 5 minutes. For each flood a broker, the real
services and a job that reports a window every 0.2 s; the delay is that from a window's report to its action at the
reader, first without the flood and then from its beginning until some time after it. The flood comes from another
process, with all permissions of a trainer, as fast as the broker takes it. What the streams' limits refuse is counted.

With `--keys` it is the broker as deploy/ configures it, the flood comes from a trainer whose key is for its own job
only, and two jobs with keys of their own are measured, some 2 minutes. Refused is then what FEED did not store. With
`--keys --flood NAME` one of the other floods comes from a trainer whose key is for all jobs.

With `--role ROLE` the floods come, one after the other, from a client with that role's key, for one job, node or
instance where it can be, on one broker as deploy/ configures it; what only that key may send is added. Refused, and how
many lines of the broker's log say so, which alerts are raised, and the delays are shown; `--role all` takes some 15
minutes.

With `--servers 3` the broker is three servers on this machine, each stream on all of them, with an fsync per message.

Every window must be decided once and in order. With a flood of full size no delay may be above 1 s.
"""

import argparse
import sys
from collections.abc import Sequence

import msgspec
from bench.failover.servers import NUM_SERVERS
from bench.floods.measurement import Delays, FloodResult, measure
from bench.floods.roles import HOSTILE_USERS, ONLY_BY_ROLE, RoleReport, RoleResult, measure_role
from bench.floods.senders import FLOODS
from bench.harness.broker import run_with_uvloop
from bench.harness.command import BenchmarkReport, Target, benchmark_parser, run_benchmark
from bench.harness.document import TablePlace
from bench.harness.tables import aligned

from dynamix.runtime.bus import BusError
from dynamix.runtime.embedded import EmbeddedServerError

BEGIN, END = "<!-- the table is made by `make floods` -->", "<!-- end of the table -->"
BEGIN_ROLES = "<!-- this table is made by `python -m bench.floods --role all` -->"
BEGIN_KEYS = "<!-- this table is made by `make floods`, too -->"
HEADINGS = [
    "flood",
    "accepted",
    "refused",
    "in [s]",
    "delay without it: median / p95 / longest [ms]",
    "with it [ms]",
]
ROLE_HEADINGS = ["key", "flood", "accepted", "refused", "delay with it: median / p95 / longest [ms]", "shown by"]
MAX_DELAY_S = 1.0
ALL = "all"


def cells_of(result: FloodResult) -> list[str]:
    """One row of the table."""
    return [
        f"{result.count:,} {FLOODS[result.flood].what}",
        f"{result.sent.accepted:,}",
        f"{result.sent.refused:,}",
        f"{result.sent.seconds:.1f}",
        *map(_shown, (result.calm, result.flooded)),
    ]


def _shown(delays: Delays) -> str:
    return " / ".join(f"{1000 * value:,.0f}" for value in (delays.median_s, delays.p95_s, delays.longest_s))


def role_cells(report: RoleReport) -> list[list[str]]:
    """The rows of a role: one without a flood, one for each that was accepted in part, and one for all others."""
    rows = [[report.role, "none", "", "", _shown(report.calm), ""]]
    for one in report.results:
        if one.sent.denied < one.count:
            alarms = [*one.alerts, *([f"{one.num_violations:,} refusals logged"] if one.num_violations else [])]
            shown = [_shown(one.flooded), ", ".join(alarms) or "nothing"]
            rows.append(
                [report.role, f"{one.count:,} {one.what}", f"{one.sent.accepted:,}", f"{one.sent.refused:,}", *shown]
            )
    if refused := [one for one in report.results if one.sent.denied >= one.count]:
        numbers = [f"{sum(get(one) for one in refused):,}" for get in (_num_refused, _num_logged)]
        longest = max(refused, key=lambda one: one.flooded.longest_s)
        names = ", ".join(one.flood for one in refused)
        rows.append([report.role, names, "0", numbers[0], _shown(longest.flooded), f"{numbers[1]} refusals logged"])
    return rows


def _num_refused(one: RoleResult) -> int:
    return one.sent.refused


def _num_logged(one: RoleResult) -> int:
    return one.num_violations


def targets_of(results: Sequence[FloodResult]) -> list[Target]:
    """What each flood is judged by."""
    return [target for result in results for target in _targets(result.flood, result.flooded, result.num_out_of_chain)]


def _targets(name: str, delays: Delays, num_out_of_chain: int) -> list[Target]:
    return [
        Target(name=f"{name}: longest delay, s", value=delays.longest_s, at_most=MAX_DELAY_S),
        Target(name=f"{name}: actions out of their chain", value=num_out_of_chain, at_most=0),
    ]


def report_of(options: argparse.Namespace) -> BenchmarkReport:
    """Run the floods, and write the table into a document that has a place for it."""
    place = TablePlace(options.document, BEGIN_KEYS if options.keys else BEGIN, END)
    results = []
    for name in options.flood or [name for name, flood in FLOODS.items() if flood.with_key == options.keys]:
        count = max(1, round(FLOODS[name].full * options.size))
        settings = {"calm_s": options.calm, "after_s": options.after, "num_servers": options.servers}
        with_keys = options.keys or FLOODS[name].with_key
        results.append(run_with_uvloop(measure(name, count, with_keys=with_keys, **settings)))
        sys.stderr.write(f"floods: {' | '.join(cells_of(results[-1]))}\n")
    cells = [cells_of(result) for result in results]
    place.write(HEADINGS, cells, num_left=1)
    figures = {"floods": [msgspec.to_builtins(result) for result in results]}
    return BenchmarkReport(figures, aligned(HEADINGS, cells), targets_of(results))


def report_of_roles(options: argparse.Namespace) -> BenchmarkReport:
    """The same for the keys of some roles."""
    place = TablePlace(options.document, BEGIN_ROLES, END)
    reports, times = [], {"calm_s": options.calm, "after_s": options.after}
    for role in HOSTILE_USERS if ALL in options.role else options.role:
        work = measure_role(role, size=options.size, only=options.flood or (), **times)
        reports.append(run_with_uvloop(work))
        sys.stderr.write("".join(f"floods: {' | '.join(row)}\n" for row in role_cells(reports[-1])))
    cells = [row for report in reports for row in role_cells(report)]
    place.write(ROLE_HEADINGS, cells, num_left=2)
    targets = [
        target
        for report in reports
        for one in report.results
        for target in _targets(f"{one.role}, {one.flood}", one.flooded, one.num_out_of_chain)
    ]
    return BenchmarkReport({"roles": msgspec.to_builtins(reports)}, aligned(ROLE_HEADINGS, cells), targets)


def main() -> int:
    """Flood; 1 when an honest job waited too long, 2 when a service failed."""
    parser = benchmark_parser(
        *("floods", __doc__),
        ("--size", 1.0, "of each flood, over the full one"),
        ("--calm", 10.0, "seconds without a flood"),
        ("--after", 10.0, "seconds after it that count as flooded"),
    )
    names = [*FLOODS, *ONLY_BY_ROLE]
    parser.add_argument("--flood", choices=names, action="append", help="only this one (may be repeated)")
    parser.add_argument("--keys", action="store_true", help="floods by a key, on the broker of a deployment")
    roles, what = [*HOSTILE_USERS, ALL], "floods by this role's key instead (may be repeated)"
    parser.add_argument("--role", choices=roles, action="append", help=what)
    parser.add_argument("--servers", type=int, choices=(1, NUM_SERVERS), default=1, help="of the broker")
    parser.add_argument("--document", metavar="FILE", help="write the table into this Markdown file, between its marks")
    options = parser.parse_args()
    if not options.role and (unknown := [name for name in options.flood or () if name in ONLY_BY_ROLE]):
        parser.error(f"--flood {unknown[0]} is sent by a role's key: add --role")
    measured = report_of_roles if options.role else report_of
    return run_benchmark("floods", options, lambda: measured(options), cannot=(BusError, EmbeddedServerError))


if __name__ == "__main__":
    sys.exit(main())
