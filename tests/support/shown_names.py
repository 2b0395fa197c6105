"""Names of all samples that any service can show."""

import asyncio
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tests.support import examples

from dynamix.arbitrator.learning.service import _Learner
from dynamix.arbitrator.shown import JobStanding, ShownDecisions
from dynamix.collector.ebpf.syscall import ProgramInfo
from dynamix.collector.shown import ShownWindows
from dynamix.reward.shown import ShownRewards
from dynamix.runtime.bus import StreamState
from dynamix.runtime.bus.read import StatisticsByKind
from dynamix.runtime.bus.requests import StreamCopies, StreamCopy
from dynamix.runtime.health import Watchdog
from dynamix.runtime.metrics import ServiceMetrics
from dynamix.runtime.service import BUS_COUNTERS, BUS_GAUGES, COUNTERS, GAUGES, ServiceState
from dynamix.schemas.streams import FEED


def shown_names() -> set[str]:
    """The names, from what each service shows of made-up messages."""
    metrics = ServiceMetrics("any")
    _show_service(metrics)
    probe = SimpleNamespace(cost=lambda: {"one": ProgramInfo("one", (), 1, 1)})
    ShownWindows(metrics, probe).record(examples.window(energy_j=1.0))
    ShownRewards(metrics).record(examples.reward("node-a", (0,)))
    decisions = ShownDecisions(metrics)
    standing = JobStanding(0, 3, 0.0, window_s=1.0, decided_window=2, global_batch_size=512, num_refused={"stale": 1})
    decisions._jobs.record("a", standing)
    decisions._streams[FEED.name] = StreamState(1, 1, 1, 1, copies=StreamCopies("a", (StreamCopy("b"),)))
    decisions._num_requests = decisions._num_violations = 1
    for number in range(3):
        decisions._runs.record_window(f"mnist-{number}", 1.0, 0.5)
        decisions._runs.end_run(f"mnist-{number}", "rule")
    context: Any = SimpleNamespace(
        metrics=metrics, bus=SimpleNamespace(objects=None), settings=SimpleNamespace(policy="mine", jobs="*")
    )
    _Learner(context, SimpleNamespace())  # type: ignore[arg-type]
    return {
        sample.name
        for family in text_string_to_metric_families(metrics.exposition("")[0].decode())
        for sample in family.samples
        if sample.name.startswith("dynamix_")
    }


def _show_service(metrics: ServiceMetrics) -> None:
    metrics.declare(counters=COUNTERS, gauges=GAUGES)
    statistics = StatisticsByKind()
    statistics.of_subjects("dynamix.v1.state.*.*")
    state = ServiceState("node-a", "node-a", asyncio.Event(), Watchdog(0.0))
    state.bus = SimpleNamespace(  # type: ignore[assignment]
        counters=dict.fromkeys((*BUS_COUNTERS, *BUS_GAUGES), 0),
        statistics=statistics,
        is_connected=True,
        seconds_left=1.0,
    )
    metrics.add(state.show)
    metrics.add(lambda scrape: metrics.show_counters(scrape, {}))
