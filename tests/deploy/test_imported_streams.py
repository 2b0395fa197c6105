"""Reading with a key: from an account without streams, by imports of requests and of what was stored."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.brokers import connected, operate, until
from tests.support.deployed_broker import NODE, DeployedBroker, deployed_broker
from tests.support.reading import read

from dynamix.runtime.bus import Bus, PermissionDeniedError
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.bus.read import make_durable, remove_durable

DURABLE = f"collector-{NODE}"
REPORT, STATE = f"dynamix.v1.report.job.1.{NODE}", f"dynamix.v1.state.job.1.{NODE}"
REPORTS, STATES = f"dynamix.v1.report.*.*.{NODE}", "dynamix.v1.state.*.*.*"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[DeployedBroker]:
    with deployed_broker(tmp_path) as broker:
        yield broker


@pytest.fixture
async def operator(broker: DeployedBroker) -> AsyncIterator[Bus]:
    async with connected(broker.settings("provision")) as bus:
        await provision(bus)
        await make_durable(bus.requests, "REPORTS", DURABLE, REPORTS, start="all")
        yield bus


@pytest.mark.parametrize("role", ["collector", "arbitrator"])
async def test_empty_messages_end_no_reading(broker: DeployedBroker, operator: Bus, role: str) -> None:
    """One without headers ends the answers to a request where it passes between accounts."""
    sender, stream, subject, wanted, durable = {
        "collector": ("trainer", "REPORTS", REPORT, REPORTS, DURABLE),
        "arbitrator": ("collector", "FEED", STATE, STATES, None),
    }[role]
    async with connected(broker.settings(role)) as bus, connected(broker.settings(sender)) as other:
        async with bus.consume(stream, [wanted], start="all", durable=durable) as consumer:
            for _ in range(2):
                for _ in range(100):
                    await other._connection.send(subject, b"")
                await other._connection.round_trip(5)
                await other.publish_bytes(subject, b"good", "")
                found = await read(consumer, 101)
                assert [message.payload for message in found] == [b""] * 100 + [b"good"]
                if durable is not None:
                    await consumer.ack(found[-1])
        assert bus.counters["consumer_resets"] == 0
    assert (await operator.stream_state(stream)).num_messages == 202


@pytest.mark.usefixtures("operator")
async def test_what_is_stored_is_heard_of_in_another_account(
    broker: DeployedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamix.runtime.bus.read.LOOK_EVERY_S", 60.0)
    async with (
        connected(broker.settings("arbitrator")) as bus,
        connected(broker.settings("collector")) as other,
        bus.consume("FEED", [STATES], start="new") as consumer,
    ):
        for number in range(3):
            await other.publish_bytes(STATE, bytes([number]), str(number))
            assert [message.payload for message in await read(consumer, 1)] == [bytes([number])]


async def test_a_reader_without_its_consumer_says_who_makes_it(broker: DeployedBroker, operator: Bus) -> None:
    await remove_durable(operator.requests, "REPORTS", DURABLE)
    async with connected(broker.settings("collector")) as bus:
        with pytest.raises(PermissionDeniedError, match="dynamix keys"):
            async with bus.consume("REPORTS", [REPORTS], start="all", durable=DURABLE):
                pass


async def test_a_reader_waits_for_its_consumer_where_all_streams_are_made_again(
    broker: DeployedBroker, operator: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        connected(broker.settings("collector")) as bus,
        connected(broker.settings("trainer")) as other,
        bus.consume("REPORTS", [REPORTS], start="all", durable=DURABLE) as consumer,
    ):
        await other.publish_bytes(REPORT, b"before", "1")
        assert len(await read(consumer, 1)) == 1
        await operate(operator, "STREAM.DELETE.REPORTS")
        await provision(operator)
        await until(lambda: f"has no consumer {DURABLE}" in caplog.text)
        await make_durable(operator.requests, "REPORTS", DURABLE, REPORTS, start="all")
        await other.publish_bytes(REPORT, b"after", "2")
        assert [message.payload for message in await read(consumer, 1)] == [b"after"]
