"""The curve: `make scale` measures 32, 128, 1,024 and 10,000 workers in one job each, by two policies; 8 minutes.

Writes docs/scale.json, docs/scale.png and the table of docs/scale.md. Cost must grow no faster than the number of
workers: CPU time of the arbitrator per window and the median latency over the whole range, and CPU time over its last
step, where the fixed cost no longer counts. The latency of the last step is not judged: other work on the machine
lengthens what takes long by more than what is short.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from bench.harness.broker import run_with_uvloop
from bench.harness.command import BenchmarkReport, benchmark_parser, run_benchmark
from bench.harness.figure import Curve, Panel, draw
from bench.harness.tables import markdown, number, replaced
from bench.scale.measurement import NUM_MESSAGES, measure
from bench.scale.plan import ScalePlan
from bench.scale.result import MAX_P95_MS, ScaleResult, describe, missed, targets_of

from dynamix.cli.output import output_directory
from dynamix.runtime import output_files

SIZES = (32, 128, 1024, 10_000)
POLICIES = ("static", "rule")
"""The one that does nothing shows what moving the messages costs; `rule` is the default of a job."""
SECONDS = 40.0
MAX_EXPONENT = 1.0
MAX_LAST_EXPONENT = 1.15
"""Limit for CPU time in the last step; repeated runs differ by 15 % on a shared machine."""

BEGIN, END = "<!-- the table is made by `make scale` -->", "<!-- end of the table -->"
COLUMNS = [
    ("policy", "{policy}"),
    ("workers", "{workers:,}"),
    (
        "latency p50 / p95 / p99 [ms]",
        "{decision_latency_p50_ms:.1f} / {decision_latency_p95_ms:.1f} / {decision_latency_p99_ms:.1f}",
    ),
    ("arbitrator, % of a core", "{cpu_percent:.1f}"),
    ("us per rank and window", "{cpu_us_per_rank_window:.1f}"),
    ("MB", "{rss_mb:.0f}"),
    ("broker, % of a core", "{broker_cpu_percent:.1f}"),
    ("MB", "{broker_rss_mb:.0f}"),
    ("ingest / raw", "{ingest_vs_raw:.2f}"),
    ("messages/s", "{messages_per_s:,.0f}"),
    ("MB/s", "{mb_per_s:.2f}"),
    ("waited, ms per window", "{waited_ms}"),
    ("load average", "{load_average:.1f}"),
]
"""Heading and format of each column of the table in docs/scale.md."""


def report_of(plans: Sequence[ScalePlan], ingest_messages: int, docs: Path) -> BenchmarkReport:
    """Measure all plans, one after the other, and write the documents."""
    results: list[ScaleResult] = []
    for at, plan in enumerate(plans, start=1):
        sys.stderr.write(f"scale: {at} of {len(plans)}: {plan.workers:,} workers, {plan.policy}\n")
        results.append(run_with_uvloop(measure(plan, ingest_messages=ingest_messages)))
        print(describe(results[-1]), flush=True)
    write(results, docs)
    targets = [target for result in results for target in targets_of(result)]
    complaints = [text for result in results for text in missed(result)] + too_steep(results)
    return BenchmarkReport({"results": results}, markdown_table(results), targets, complaints)


def write(results: Sequence[ScaleResult], docs: Path) -> None:
    """The figures, the picture and, where there is a document, its table."""
    docs.mkdir(parents=True, exist_ok=True)
    output_files.write(docs / "scale.json", msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    draw([panels_of(results)], docs / "scale.png")
    document = docs / "scale.md"
    if document.exists():
        text = replaced(document.read_text(), BEGIN, END, f"\n{markdown_table(results)}\n")
        output_files.write(document, text.encode())


def markdown_table(results: Sequence[ScaleResult]) -> str:
    """One row per measurement."""
    rows = [
        msgspec.structs.asdict(one)
        | {"mb_per_s": one.bytes_per_s / 1e6, "waited_ms": number(one.wait_ms_per_window, 1)}
        for one in results
    ]
    cells = [[cell.format_map(row) for _, cell in COLUMNS] for row in rows]
    return markdown([heading for heading, _ in COLUMNS], cells, num_left=2)


def panels_of(results: Sequence[ScaleResult]) -> list[Panel]:
    """Latency and CPU time over the number of workers, both axes logarithmic."""

    def curves(**figures: tuple[str, Callable[[ScaleResult], float]]) -> list[Curve]:
        return [
            Curve(label=f"{policy}, {what}", style=style, points=[(one.workers, value(one)) for one in curve])
            for policy, curve in by_policy(results)
            for what, (style, value) in figures.items()
        ]

    latency = curves(
        p50=("o-", lambda one: one.decision_latency_p50_ms), p95=("s--", lambda one: one.decision_latency_p95_ms)
    )
    cpu = curves(
        arbitrator=("o-", lambda one: _cpu_ms(one, one.cpu_percent)),
        broker=("^:", lambda one: _cpu_ms(one, one.broker_cpu_percent)),
    )
    return [
        _with_linear("Last state of a window to its action", "ms, by the broker's clock", latency, limit=MAX_P95_MS),
        _with_linear("CPU time of a window: arbitrator, broker", "ms", cpu),
    ]


def _with_linear(title: str, y: str, curves: list[Curve], limit: float | None = None) -> Panel:
    """A panel with a line that grows with the number of workers up to the top of the first curve."""
    low, high = curves[0].points[0][0], curves[0].points[-1][0]
    top = curves[0].points[-1][1]
    linear = Curve(label="linear", style="-", points=[(low, top * low / high), (high, top)])
    return Panel(title=title, x="workers", y=y, curves=[*curves, linear], logarithmic=True, limit=limit)


def _cpu_ms(result: ScaleResult, percent: float) -> float:
    """CPU time per window of one job; what /proc shows as 0 is below its tick and not drawn."""
    return 10 * percent / (result.rate * result.jobs) or math.nan


def too_steep(results: Sequence[ScaleResult]) -> list[str]:
    """Where cost grew faster than the number of workers, in words."""
    found = []
    for policy, curve in by_policy(results):
        for what, field in (("CPU", "cpu_percent"), ("median latency", "decision_latency_p50_ms")):
            if len(curve) < 2:
                continue
            overall, last = exponent(curve[0], curve[-1], field), exponent(curve[-2], curve[-1], field)
            if not overall <= MAX_EXPONENT or (field == "cpu_percent" and not last <= MAX_LAST_EXPONENT):
                found.append(f"{policy}: {what} grows with the power {overall:.2f} of the workers, {last:.2f} last")
    return found


def by_policy(results: Sequence[ScaleResult]) -> Iterator[tuple[str, list[ScaleResult]]]:
    """The results of each policy, by size."""
    for policy in dict.fromkeys(result.policy for result in results):
        yield policy, sorted((one for one in results if one.policy == policy), key=lambda one: one.workers)


def exponent(before: ScaleResult, after: ScaleResult, field: str) -> float:
    """The power of the number of workers that a figure grew with; NaN where it was 0."""
    low, high = getattr(before, field), getattr(after, field)
    return math.log(high / low) / math.log(after.workers / before.workers) if low > 0 and high > 0 else math.nan


def main() -> int:
    """Measure, print, write; 1 when a target is missed, 2 when there is nothing to judge."""
    parser = benchmark_parser("scale.curve", __doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of workers (default: four)")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="(default: static rule)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="judged of each (default: %(default)s)")
    parser.add_argument("--ingest-messages", type=int, default=NUM_MESSAGES)
    parser.add_argument(
        "--docs", type=output_directory, default=Path("docs"), help="where to write (default: %(default)s)"
    )
    options = parser.parse_args()
    plans = [
        ScalePlan(workers=size, policy=policy, seconds=options.seconds)
        for policy, size in itertools.product(options.policies, options.sizes)
    ]
    return run_benchmark("scale", options, lambda: report_of(plans, options.ingest_messages, options.docs))


if __name__ == "__main__":
    sys.exit(main())
