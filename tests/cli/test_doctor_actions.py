"""`dynamix doctor --actions JOB`, on logs that are whole and logs that are not."""

from tests.support import examples
from tests.support.brokers import ConfiguredServer

from dynamix.cli.commands.doctor import actions
from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.chain import seal
from dynamix.schemas.messages import Action


async def store(bus: Bus, num: int, *, broken_at: int | None = None) -> list[Action]:
    """A chain of a job's actions; from `broken_at` on it is another one."""
    await bus.publish(examples.job())
    stored: list[Action] = []
    previous, sequence = b"", 0
    for window in range(num):
        stored.append(seal(examples.action(window), b"x" * 32 if window == broken_at else previous))
        previous = stored[-1].hash
        sequence = await bus.publish_next(stored[-1], expected_last=sequence)
    return stored


async def test_a_whole_chain_is_there_with_its_length(server: ConfiguredServer, bus: Bus) -> None:
    await bus.publish(examples.applied(1198, 1200, action_hash=(await store(bus, 1200))[-2].hash))
    found = await actions(server.settings, examples.JOB)
    assert found.present
    assert found.found == f"1,200 of {examples.JOB}, a whole chain up to window 1199 of generation 0"


async def test_a_broken_chain_and_an_end_that_the_trainer_is_ahead_of_are_found(
    server: ConfiguredServer, bus: Bus
) -> None:
    last = (await store(bus, 9, broken_at=4))[-1]
    found = await actions(server.settings, examples.JOB)
    assert not found.present
    assert "the action for window 4 of generation 0 does not follow the one before it" in found.found
    assert "start the run under a new id" in found.fix
    await bus.publish(examples.applied(12, 14, action_hash=last.hash))
    found = await actions(server.settings, examples.JOB)
    assert "the trainer applied an action for window 12" in found.found


async def test_no_job_no_action_and_no_broker_are_told_apart(server: ConfiguredServer, bus: Bus) -> None:
    assert (await actions(server.settings, "missing-0")).found == "no job is called 'missing-0'"
    assert not (await actions(server.settings, "No Token")).present
    await bus.publish(examples.job())
    assert (await actions(server.settings, examples.JOB)).found == f"none yet of {examples.JOB}"
    assert not (await actions(BusSettings(url="nats://127.0.0.1:1"), examples.JOB)).present
