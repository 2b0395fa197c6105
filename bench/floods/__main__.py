"""How long an honest job waits for its decisions while one client floods the broker.

`python -m bench.floods [--keys] [--flood NAME] [--json FILE]`, some 5 minutes. For each flood a broker, the real
services and a job that reports a window every 0.2 s; the delay is that from a window's report to its action at the
reader, first without the flood and then from its beginning until some time after it. The flood comes from another
process, with all permissions of a trainer, as fast as the broker takes it. What the streams' limits refuse is counted.

With `--keys` it is the broker as deploy/ configures it, the flood comes from a trainer whose key is for its own job
only, and two jobs with keys of their own are measured, some 2 minutes. Refused is then what FEED did not store. With
`--keys --flood NAME` one of the other floods comes from a trainer whose key is for all jobs.

With `--servers 3` the broker is three servers on this machine, each stream on all of them, with an fsync per message.

Every window must be decided once and in order. With a flood of full size no delay may be above 1 s.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from bench.failover.servers import NUM_SERVERS
from bench.floods.measurement import FloodResult, measure
from bench.floods.senders import FLOODS
from bench.harness.broker import run_with_uvloop
from bench.harness.command import BenchmarkReport, Target, benchmark_parser, run_benchmark
from bench.harness.tables import aligned, markdown, replaced

from dynamix.runtime import output_files
from dynamix.runtime.bus import BusError
from dynamix.runtime.embedded import EmbeddedServerError

BEGIN, END = "<!-- the table is made by `make floods` -->", "<!-- end of the table -->"
BEGIN_KEYS = "<!-- this table is made by `make floods`, too -->"
HEADINGS = [
    "flood",
    "accepted",
    "refused",
    "in [s]",
    "delay without it: median / p95 / longest [ms]",
    "with it [ms]",
]
MAX_DELAY_S = 1.0


def cells_of(result: FloodResult) -> list[str]:
    """One row of the table."""
    return [
        f"{result.count:,} {FLOODS[result.flood].what}",
        f"{result.sent.accepted:,}",
        f"{result.sent.refused:,}",
        f"{result.sent.seconds:.1f}",
        *(
            " / ".join(f"{1000 * value:,.0f}" for value in (delays.median_s, delays.p95_s, delays.longest_s))
            for delays in (result.calm, result.flooded)
        ),
    ]


def targets_of(results: Sequence[FloodResult]) -> list[Target]:
    """What each flood is judged by."""
    return [
        target
        for result in results
        for target in (
            Target(name=f"{result.flood}: longest delay, s", value=result.flooded.longest_s, at_most=MAX_DELAY_S),
            Target(name=f"{result.flood}: actions out of their chain", value=result.num_out_of_chain, at_most=0),
        )
    ]


def report_of(options: argparse.Namespace) -> BenchmarkReport:
    """Run the floods, and write the table into a document that has a place for it."""
    results = []
    for name in options.flood or [name for name, flood in FLOODS.items() if flood.with_key == options.keys]:
        count = max(1, round(FLOODS[name].full * options.size))
        settings = {"calm_s": options.calm, "after_s": options.after, "num_servers": options.servers}
        with_keys = options.keys or FLOODS[name].with_key
        results.append(run_with_uvloop(measure(name, count, with_keys=with_keys, **settings)))
        sys.stderr.write(f"floods: {' | '.join(cells_of(results[-1]))}\n")
    cells = [cells_of(result) for result in results]
    if options.document:
        path = Path(options.document)
        begin = BEGIN_KEYS if options.keys else BEGIN
        text = replaced(path.read_text(), begin, END, f"\n{markdown(HEADINGS, cells, num_left=1)}\n")
        output_files.write(path, text.encode())
    figures = {"floods": [msgspec.to_builtins(result) for result in results]}
    return BenchmarkReport(figures, aligned(HEADINGS, cells), targets_of(results))


def main() -> int:
    """Flood; 1 when an honest job waited too long, 2 when a service failed."""
    parser = benchmark_parser(
        *("floods", __doc__),
        ("--size", 1.0, "of each flood, over the full one"),
        ("--calm", 10.0, "seconds without a flood"),
        ("--after", 10.0, "seconds after it that count as flooded"),
    )
    parser.add_argument("--flood", choices=[*FLOODS], action="append", help="only this one (may be repeated)")
    parser.add_argument("--keys", action="store_true", help="floods by a key, on the broker of a deployment")
    parser.add_argument("--servers", type=int, choices=(1, NUM_SERVERS), default=1, help="of the broker")
    parser.add_argument("--document", metavar="FILE", help="write the table into this Markdown file, between its marks")
    options = parser.parse_args()
    return run_benchmark("floods", options, lambda: report_of(options), cannot=(BusError, EmbeddedServerError))


if __name__ == "__main__":
    sys.exit(main())
