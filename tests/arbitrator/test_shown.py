"""Metrics of the arbitrator: where jobs stand, refused actions, copies of streams that lag, how runs differ."""

import asyncio
import itertools

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support import examples
from tests.support.services_here import services_here

from dynamix.arbitrator import shown
from dynamix.arbitrator.shown import RunTimes, ShownDecisions
from dynamix.runtime.bus import Bus, PermissionDeniedError, StreamState
from dynamix.runtime.bus.requests import StreamCopies, StreamCopy
from dynamix.runtime.metrics import ServiceMetrics


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> ServiceMetrics:
    monkeypatch.setattr(shown, "STREAMS_EVERY_S", 0.0)
    made = ServiceMetrics("arbitrator")
    made.is_served = True
    return made


def samples(text: str, name: str, label: str) -> dict[str, float]:
    """The values of a metric by one label."""
    families = text_string_to_metric_families(text)
    return {one.labels[label]: one.value for each in families for one in each.samples if one.name == f"dynamix_{name}"}


def shown_now(metrics: ServiceMetrics, name: str, label: str) -> dict[str, float]:
    return samples(metrics.exposition("")[0].decode(), name, label)


def test_a_job_is_shown_until_its_end_with_refused_actions_by_known_reason(metrics: ServiceMetrics) -> None:
    decisions, state, job = ShownDecisions(metrics), examples.state(), examples.job()
    decisions.record_state(state)
    assert shown_now(metrics, "job_state_window", "training_job") == {job.job: 0.0}
    reasons = {"stale": 2, "bounds": 1} | {f"made-up-{number}": 1 for number in range(1000)}
    decisions.record_receipt(examples.applied(0, 2, num_refused=reasons))
    refused = shown_now(metrics, "job_refused_actions", "reason")
    assert refused == {"bounds": 1.0, "other": 1000.0, "stale": 2.0}
    decisions.record_end(msgspec.structs.replace(job, phase="ended", end_reason="completed"))
    decisions.record_state(state)  # it comes after the end, from another stream
    assert shown_now(metrics, "job_state_window", "training_job") == {}
    decisions.record_state(msgspec.structs.replace(state, generation=1))  # started again under the same id
    assert shown_now(metrics, "job_state_window", "training_job") == {job.job: 0.0}


async def test_the_service_shows_what_receipts_tell(bus: Bus) -> None:
    async with services_here(bus, "arbitrator") as services, asyncio.timeout(60):
        await bus.publish(examples.job())
        for window in itertools.count():  # the first ones may come before it listens to receipts
            await bus.publish(examples.state(window_index=window))
            await bus.publish(examples.applied(window, window + 2, num_refused={"stale": 2}))
            if found := samples(services["arbitrator"].scrape(), "job_refused_actions", "reason"):
                break
            await asyncio.sleep(0.05)
    assert found == {"stale": 2.0}


async def test_what_a_key_may_not_see_is_left_out_and_the_rest_is_watched(
    metrics: ServiceMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    decisions, counts, num_asked = ShownDecisions(metrics), iter((5, 7)), itertools.count()

    async def count_requests() -> int:
        if (count := next(counts, None)) is None:
            raise PermissionDeniedError("may not")
        return count

    async def state_of(name: str) -> StreamState:
        if next(num_asked) > 20:
            raise asyncio.CancelledError
        if name == "ACTIONS":
            raise PermissionDeniedError("may not")
        behind = StreamCopy(name="broker-2", lag=7)
        return StreamState(2, 1, 0, copies=StreamCopies("broker-1", (behind, StreamCopy("broker-3", current=True))))

    with pytest.raises(asyncio.CancelledError):
        await decisions.follow_broker(state_of, count_requests)
    assert shown_now(metrics, "broker_requests_total", "component") == {"arbitrator": 7.0}
    assert shown_now(metrics, "stream_copy_lag", "stream") == dict.fromkeys(
        ("REPORTS", "FEED", "JOBS", "DEAD", "PROFILES"), 7.0
    )
    assert shown_now(metrics, "stream_copy_lag", "server") == {"broker-2": 7.0}
    assert "requests to the broker are not counted: may not" in caplog.text
    assert "ACTIONS is not watched: may not" in caplog.text


def test_runs_of_one_name_and_policy_are_compared_by_the_time_to_the_accuracy_that_all_reached() -> None:
    times = RunTimes()

    def run(job: str, windows: list[tuple[float, float]], policy: str = "rule") -> None:
        for time_s, accuracy in windows[:-1]:
            times.record_window(job, time_s, accuracy)
        times.end_run(job, policy)
        times.record_window(job, *windows[-1])  # the last window may come after the end

    run("mnist-a", [(1.0, np.nan), (1.0, 0.5), (1.0, 0.8), (9.0, 0.9)])  # 0.8 after 3 s
    run("mnist-b", [(2.0, 0.7), (2.0, 0.6), (2.0, 0.85)])  # after 6 s
    run("mnist-d", [(1.0, 0.5)], policy="split")
    run("mnist-e", [(1.0, np.nan)])
    run("other-f", [(1.0, 0.5)])
    assert times.variations() == {}
    run("mnist-c", [(9.0, 0.8)])  # after 9 s
    assert times.variations() == {("mnist", "rule"): pytest.approx(6**0.5 / 6)}
