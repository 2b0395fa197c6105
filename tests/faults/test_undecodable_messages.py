"""Undecodable messages on the subjects that services read: they are counted, stored in DEAD, and change no decision."""

import asyncio
import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.support.bus_watch import watching
from tests.support.control_plane import NODE, ControlPlane, control_plane, one_node_job, report_of
from tests.support.decision_checks import check_decisions
from tests.support.faults import Figure, Scale
from tests.support.undecodable_payloads import READERS, UndecodablePayload, undecodable_payloads

from dynamix.runtime.bus.errors import PublishError
from dynamix.schemas import subjects
from dynamix.schemas.codec import MAX_MESSAGE_BYTES, MalformedMessageError, decode_any
from dynamix.schemas.messages import Dead
from dynamix.schemas.streams import DEAD, FEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZES, SPEEDS = (128,) * 4, (3000.0, 3000.0, 2000.0, 1000.0)


class PayloadInjector:
    """Publishes payloads to a running control plane; hypothesis calls it once per example."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._windows = itertools.count()
        self._numbers = itertools.count()
        self.sent: Counter[str] = Counter()
        """Payloads published, by the service that reads them."""

    async def inject(self, payloads: list[UndecodablePayload]) -> None:
        """Publish the payloads, then one valid report, which must lead to a reward and an action."""
        for one in payloads:
            try:
                await self._plane.bus.publish_bytes(one.subject, one.payload, f"undecodable:{next(self._numbers)}")
            except PublishError:
                assert len(one.payload) >= MAX_MESSAGE_BYTES  # the broker stores none that is so large
            else:
                self.sent[READERS[one.kind]] += 1
        window = next(self._windows)
        await self._plane.bus.publish(report_of(one_node_job(), window, SIZES, SPEEDS))
        await self._plane.wait_for_actions(window + 1)
        reward = subjects.of("reward", one_node_job().job, "*")
        await self._plane.wait_for(FEED.name, reward, window + 1)

    async def check(self) -> None:
        """Check that every payload was counted, DEAD has reasons, and the decisions are those of the reference fold."""
        plane, job, num_windows = self._plane, one_node_job(), next(self._windows)
        async with watching(plane.bus, job.job) as watch:
            for service, count in self.sent.items():
                counted = functools.partial(watch.counter, NODE, "dead_letters", service)
                await watch.until(lambda counted=counted, count=count: counted() >= count)
                assert counted() == count
        assert all(service.exit_code() is None for service in plane.services.values())
        await check_decisions(plane.bus, job, num_windows=num_windows)
        letters = [letter for _, letter in await plane.messages(DEAD.name, f"{subjects.ROOT}.dead.>")]
        assert {letter.service for letter in letters if isinstance(letter, Dead) and letter.reason} == set(self.sent)


@contextlib.contextmanager
def running_injector() -> Iterator[tuple[asyncio.Runner, PayloadInjector]]:
    """Services in an event loop of their own, since hypothesis calls plain functions."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        plane = runner.run(stack.enter_async_context(control_plane("collector", "reward", "arbitrator")))
        try:
            runner.run(plane.bus.publish(one_node_job()))
            yield runner, PayloadInjector(plane)
        finally:
            runner.run(stack.aclose())


def test_every_service_counts_undecodable_messages_and_continues(
    scale: Scale, figure: Figure, request: pytest.FixtureRequest
) -> None:
    with running_injector() as (runner, injector):

        @seed(request.config.getoption("--faults-seed"))
        @settings(
            max_examples=scale(25, 200),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow],
        )
        @given(st.lists(undecodable_payloads(), min_size=1, max_size=8))
        def publish(payloads: list[UndecodablePayload]) -> None:
            for one in payloads:
                with pytest.raises(MalformedMessageError):
                    decode_any(one.subject, one.payload)
            runner.run(injector.inject(payloads))

        publish()
        runner.run(injector.check())
    figure("undecodable_messages", sum(injector.sent.values()))
