"""What the arbitrator shows: a job's refused actions, as its trainer's receipts say, and copies of streams that lag."""

import asyncio
import itertools

import pytest
from tests.support import examples
from tests.support.services_here import services_here

from dynamix.arbitrator import shown
from dynamix.arbitrator.shown import ShownDecisions
from dynamix.runtime.bus import Bus, PermissionDeniedError, StreamState
from dynamix.runtime.bus.requests import StreamCopies, StreamCopy
from dynamix.runtime.metrics import ServiceMetrics


def refused(text: str) -> list[str]:
    """The samples' labels and values."""
    return sorted(line.partition("{")[2] for line in text.splitlines() if line.startswith("dynamix_job_refused_"))


@pytest.fixture
def metrics() -> ServiceMetrics:
    made = ServiceMetrics("arbitrator")
    made.is_served = True
    return made


def test_refused_actions_are_shown_by_reason_and_all_made_up_reasons_as_one(metrics: ServiceMetrics) -> None:
    shown = ShownDecisions(metrics)
    shown.record_state(examples.state())
    reasons = {"stale": 2, "bounds": 1} | {f"made-up-{number}": 1 for number in range(1000)}
    shown.record_receipt(examples.applied(0, 2, num_refused=reasons))
    assert refused(metrics.exposition("")[0].decode()) == [
        f'component="arbitrator",reason="{reason}",training_job="{examples.JOB}"}} {count}'
        for reason, count in (("bounds", 1.0), ("other", 1000.0), ("stale", 2.0))
    ]


async def test_the_service_shows_what_receipts_say(bus: Bus) -> None:
    async with services_here(bus, "arbitrator") as services, asyncio.timeout(30):
        await bus.publish(examples.job())
        for window in itertools.count():  # the first ones may come before it listens to receipts
            await bus.publish(examples.state(window_index=window))
            await bus.publish(examples.applied(window, window + 2, num_refused={"stale": 2}))
            if found := refused(services["arbitrator"].scrape()):
                break
            await asyncio.sleep(0.05)
    assert found == [f'component="arbitrator",reason="stale",training_job="{examples.JOB}"}} 2.0']


async def test_requests_to_the_broker_are_counted_unless_the_key_may_not_ask(
    metrics: ServiceMetrics, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shown, "STREAMS_EVERY_S", 0.0)
    decisions, counts = ShownDecisions(metrics), iter((5, 7))

    async def count_requests() -> int:
        if (count := next(counts, None)) is None:
            raise PermissionDeniedError("may not")
        return count

    assert "broker_requests" not in metrics.exposition("")[0].decode()
    await decisions.follow_requests(count_requests)
    assert 'dynamix_broker_requests_total{component="arbitrator"} 7.0\n' in metrics.exposition("")[0].decode()
    assert "requests to the broker are not counted: may not; run `dynamix keys refresh`" in caplog.text


async def test_a_stream_that_a_key_may_not_see_is_left_out_and_the_others_are_watched(
    metrics: ServiceMetrics, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A key of an earlier version may not ask for the state of ACTIONS."""
    monkeypatch.setattr(shown, "STREAMS_EVERY_S", 0.0)
    asked: list[str] = []

    async def state_of(name: str) -> StreamState:
        asked.append(name)
        if len(asked) > 11:
            raise asyncio.CancelledError
        if name == "ACTIONS":
            raise PermissionDeniedError("may not")
        behind = StreamCopy(name="broker-2", lag=7)
        return StreamState(1, 1, 1, copies=StreamCopies("broker-1", (behind, StreamCopy("broker-3", current=True))))

    decisions = ShownDecisions(metrics)
    with pytest.raises(asyncio.CancelledError):
        await decisions.follow_streams(state_of)
    seen = ["REPORTS", "FEED", "JOBS", "DEAD", "PROFILES"]
    assert asked == [*seen[:3], "ACTIONS", *seen[3:], *seen, "REPORTS"]
    assert "ACTIONS is not watched: may not; run `dynamix keys refresh`" in caplog.text
    text = metrics.exposition("")[0].decode()
    lags = [line for line in text.splitlines() if line.startswith("dynamix_stream_copy_lag{")]
    assert [line.partition(",")[2] for line in lags] == [
        f'server="broker-2",stream="{stream}"}} 7.0' for stream in seen
    ]
