"""What the arbitrator shows of a job's refused actions, as its trainer's receipts say."""

import asyncio
import itertools

import pytest
from tests.support import examples
from tests.support.services_here import services_here

from dynamix.arbitrator.shown import ShownDecisions
from dynamix.runtime.bus import Bus
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


def test_a_new_generation_begins_without_refused_actions(metrics: ServiceMetrics) -> None:
    shown = ShownDecisions(metrics)
    shown.record_receipt(examples.applied(0, 2, num_refused={"stale": 2}))  # without a state there is no such job
    shown.record_state(examples.state(generation=1))
    shown.record_receipt(examples.applied(0, 2, num_refused={"stale": 2}))
    assert refused(metrics.exposition("")[0].decode()) == []


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
