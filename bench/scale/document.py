"""The table of docs/scale.md, between its markers."""

from collections.abc import Sequence

from bench.scale.result import Result

BEGIN, END = "<!-- the table is made by `make scale` -->", "<!-- end of the table -->"
COLUMNS = (
    "policy",
    "workers",
    "latency p50 / p95 / p99 [ms]",
    "arbitrator, % of a core",
    "us per rank and window",
    "MB",
    "broker, % of a core",
    "MB",
    "ingest / raw",
    "messages/s",
    "MB/s",
    "waited, ms per window",
    "load average",
)


def markdown(results: Sequence[Result]) -> str:
    """One row per measurement."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * 2 + "|---:" * (len(COLUMNS) - 2) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(_row(result)) + " |" for result in results)])


def with_table(document: str, results: Sequence[Result]) -> str:
    """The document with the table in its place.

    Raises:
        ValueError: when it has no markers.
    """
    before, found, rest = document.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"docs/scale.md has no place for the table: it needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{markdown(results)}\n\n{END}{after}"


def _row(result: Result) -> list[str]:
    latencies = (
        result.decision_latency_p50_ms,
        result.decision_latency_p95_ms,
        result.decision_latency_p99_ms,
    )
    return [
        result.policy,
        f"{result.workers:,}",
        " / ".join(f"{latency:.1f}" for latency in latencies),
        f"{result.cpu_percent:.1f}",
        f"{result.cpu_us_per_rank_window:.1f}",
        f"{result.rss_mb:.0f}",
        f"{result.broker_cpu_percent:.1f}",
        f"{result.broker_rss_mb:.0f}",
        f"{result.ingest_vs_raw:.2f}",
        f"{result.messages_per_s:,.0f}",
        f"{result.bytes_per_s / 1e6:.2f}",
        "-" if result.wait_ms_per_window is None else f"{result.wait_ms_per_window:.1f}",
        f"{result.load_average:.1f}",
    ]
