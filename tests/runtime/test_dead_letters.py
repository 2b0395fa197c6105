"""Messages that could not be used."""

import collections

import pytest
from tests.support.brokers import ConfiguredServer, until

from dynamix.runtime.bus import Bus, BusMessage
from dynamix.runtime.bus.health import DeadLetters, tokens_of
from dynamix.schemas import codec
from dynamix.schemas.messages import Dead

SUBJECT = "dynamix.v1.state.job.1.node-a"


def message(subject: str = SUBJECT, payload: bytes = b"garbage", sequence: int = 7) -> BusMessage:
    return BusMessage(subject, payload, sequence, 0, 0)


async def test_a_dead_letter_keeps_origin_reason_and_the_first_4_kb(bus: Bus) -> None:
    counters: collections.Counter[str] = collections.Counter()
    await DeadLetters(bus, "arbitrator", counters).set_aside(message(payload=bytes(10_000)), "not a message of ours")
    assert await bus.flush()
    stored = await bus.last("DEAD", "dynamix.v1.dead.state.job.1")
    dead = codec.decode(Dead, stored.subject, stored.payload)
    assert dead == Dead(
        service="arbitrator", subject=SUBJECT, sequence=7, reason="not a message of ours", payload=bytes(4096)
    )
    assert counters == {"dead_letters": 1}


async def test_all_are_counted_and_about_ten_a_second_of_a_kind_are_kept(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamix.runtime.rate_limit.time.monotonic", lambda: 100.0)
    counters: collections.Counter[str] = collections.Counter()
    letters = DeadLetters(bus, "arbitrator", counters)
    for number in range(50):
        await letters.set_aside(message(sequence=number), "bad")
    await letters.set_aside(message("dynamix.v1.report.job.1.node-a"), "bad")
    assert await bus.flush()
    assert (await bus.stream_state("DEAD")).num_messages == 11
    assert counters == {"dead_letters": 51, "dead_letters_not_kept": 40}


async def test_a_bus_that_cannot_keep_it_does_not_end_the_service(server: ConfiguredServer, bus: Bus) -> None:
    counters: collections.Counter[str] = collections.Counter()
    letters = DeadLetters(bus, "arbitrator", counters)
    await server.kill()
    await until(lambda: not bus.is_connected)
    await bus.close()
    await letters.set_aside(message(), "bad")
    assert counters == {"dead_letters": 1, "dead_letters_not_kept": 1}


@pytest.mark.parametrize(
    ("subject", "tokens"),
    [
        (SUBJECT, ("state", "job-1")),
        ("dynamix.v1.action.job.1", ("action", "job-1")),
        ("dynamix.v1.policy.ppo", ("policy", "ppo")),
        ("dynamix.v1.state", ("state", "unknown")),
        ("dynamix.v1.state.Job_1.node", ("state", "unknown")),
        ("dynamix.v1.nonsense.job.1", ("unknown", "unknown")),
        ("elsewhere.state.job-1", ("unknown", "unknown")),
        ("", ("unknown", "unknown")),
    ],
)
def test_kind_and_job_come_from_the_subject_where_they_are_valid(subject: str, tokens: tuple[str, str]) -> None:
    assert tokens_of(subject) == tokens
