"""The figures of one measurement, and which targets they miss."""

import msgspec
from bench.harness.command import Target
from bench.scale.plan import MEMORY_WARM_UP_S

MAX_P95_MS = 100.0
MIN_INGEST = 0.6
MAX_RSS_GROWTH_MB = 5.0
MEMORY_RUN_S = MEMORY_WARM_UP_S + 1200.0
"""Runs shorter than this say nothing about the growth of memory."""


class ScaleResult(msgspec.Struct, frozen=True, kw_only=True):
    """All figures; latencies by the broker's clock, CPU in per cent of one core, memory in MiB."""

    workers: int
    jobs: int
    nodes: int
    rate: float
    seconds: float
    policy: str
    background: bool
    spread_s: float
    decision_latency_p50_ms: float
    decision_latency_p95_ms: float
    decision_latency_p99_ms: float
    decision_latency_max_ms: float
    windows_expected: int
    """With those to warm up."""
    windows_decided: int
    actions_out_of_chain: int
    late_states: int
    max_lag_windows: int
    """Most windows of one job that were complete and not decided at once; 1 is the least there can be."""
    ingest_vs_raw: float
    ingest_per_s: float
    raw_per_s: float
    ingest_cpu_us: float
    """CPU time of the reading process per message, decoding included."""
    raw_cpu_us: float
    cpu_percent: float
    """CPU time of the arbitrator over the judged windows, in per cent of a core."""
    cpu_us_per_rank_window: float
    """The same time, over ranks and windows."""
    rss_mb: float
    """Memory of the arbitrator at the end."""
    rss_growth_mb: float
    """Growth of the arbitrator's memory, after a warm-up of 300 s or a fifth of the run."""
    max_loop_lag_ms: int
    """The longest that the arbitrator's event loop was late."""
    broker_cpu_percent: float
    broker_rss_mb: float
    generator_rate: float
    """Windows per second and job that the generator achieved."""
    generator_lateness_ms: float
    """The longest that a window began after it was due."""
    publishing_ms: float
    """Median time from a window's first message to the acknowledgement of its last state."""
    messages_per_s: float
    bytes_per_s: float
    """Bytes of payloads published, actions left out."""
    state_bytes: int
    action_bytes: int
    publish_retries: int
    load_average: float
    """Load of the machine over the last minute of the run, other work included."""
    wait_ms_per_window: float | None = None
    """Time that the arbitrator was ready and waited for a processor: so much of a latency is not ours.
    `None` where the kernel does not count."""


def targets_of(result: ScaleResult) -> list[Target]:
    """The targets of one measurement; a short one has none for memory."""
    label = f"{result.policy}, {result.workers:,} workers:"
    latency = Target(
        name=f"{label} p95 of the decision latency, ms", value=result.decision_latency_p95_ms, at_most=MAX_P95_MS
    )
    ingest = Target(name=f"{label} ingest of raw", value=result.ingest_vs_raw, at_least=MIN_INGEST)
    memory = Target(name=f"{label} growth of memory, MB", value=result.rss_growth_mb, at_most=MAX_RSS_GROWTH_MB)
    return [latency, ingest, *([memory] if result.seconds >= MEMORY_RUN_S else [])]


def missed(result: ScaleResult) -> list[str]:
    """What must hold beside the targets and does not, in words: every window is decided once, in its chain."""
    if result.windows_decided >= result.windows_expected and not result.actions_out_of_chain:
        return []
    decided = f"{result.windows_decided} of {result.windows_expected} windows decided"
    return [f"{decided}, {result.actions_out_of_chain} actions out of their chain"]


def describe(result: ScaleResult) -> str:
    """The figures for people."""
    return f"""\
{result.workers:,} workers on {result.nodes:,} nodes in {result.jobs} job(s), {result.policy}, \
{result.rate:g} windows/s each, {result.seconds:g} s
  decision latency   p50 {result.decision_latency_p50_ms:.1f}, p95 {result.decision_latency_p95_ms:.1f}, \
p99 {result.decision_latency_p99_ms:.1f}, max {result.decision_latency_max_ms:.1f} ms
  windows            {result.windows_decided} of {result.windows_expected} decided, lag at most \
{result.max_lag_windows}, {result.late_states} late states
  ingest             {result.ingest_vs_raw:.2f} of raw: {result.ingest_per_s:,.0f}/s at {result.ingest_cpu_us:.1f} us, \
raw {result.raw_per_s:,.0f}/s at {result.raw_cpu_us:.1f} us
  arbitrator         {result.cpu_percent:.1f} % of a core, {result.cpu_us_per_rank_window:.1f} us per rank and window, \
{result.rss_mb:.0f} MB, grew {result.rss_growth_mb:+.1f} MB{_waited(result)}
  broker             {result.broker_cpu_percent:.1f} % of a core, {result.broker_rss_mb:.0f} MB
  load               {result.generator_rate:.3f} windows/s, at most {result.generator_lateness_ms:.1f} ms late, \
{result.publishing_ms:.0f} ms to publish
  passed through     {result.messages_per_s:,.0f} messages/s, {result.bytes_per_s / 1e6:.2f} MB/s"""


def _waited(result: ScaleResult) -> str:
    if result.wait_ms_per_window is None:
        return ""
    return (
        f"\n  waiting            {result.wait_ms_per_window:.1f} ms per window for a processor; "
        f"load average {result.load_average:.1f}"
    )
