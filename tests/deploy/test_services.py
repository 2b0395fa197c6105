"""The real services, commands and views against the deployed broker, each with its own user's rights."""

import asyncio
import sys
from pathlib import Path

import pytest
from tests.support.control_plane import NODE, one_node_job, report_of
from tests.support.deployed_broker import INSTANCE, DeployedBroker

from dynamix.cli.commands.doctor import HOW_TO_LOOK, is_alive
from dynamix.cli.commands.doctor import bus as bus_checks
from dynamix.cli.fleet import Fleet
from dynamix.cli.services import SERVICES, ServiceProcess, bus_environment, wait_until_ready
from dynamix.recording import capture
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Live, Reward
from dynamix.schemas.streams import ACTIONS, FEED


def environment(service: str) -> dict[str, str]:
    """A reward service's key is for its instance."""
    return {"DYNAMIX_NODE": NODE} | ({"DYNAMIX_INSTANCE": INSTANCE} if service == "reward" else {})


async def stored(bus: Bus, stream: str, subject: str) -> bytes:
    """The payload of the first message on a subject, once it is there."""
    async with bus.consume(stream, [subject], start="all") as consumer:
        async for batch in consumer:
            return batch[0].payload
    raise AssertionError("the consumer ended")


async def denials(bus: Bus) -> dict[str, int]:
    """Permissions that each service was denied, by its next heartbeat."""
    found: dict[str, int] = {}
    async with bus.subscribe(subjects.of("live", "*", "*")) as beats:
        async for message in beats:
            beat = decode(Live, message.subject, message.payload)
            found[beat.service] = beat.counters["bus_permission_denials"]
            if set(found) == set(SERVICES):
                return found
    raise AssertionError("the subscription ended")


async def test_a_window_passes_all_services_and_views_without_a_denied_permission(
    broker: DeployedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = [
        ServiceProcess(name, {**bus_environment(broker.settings(name)), **environment(name)}) for name in SERVICES
    ]
    trainer = await Bus.connect(broker.settings("trainer"), name="trainer-1")
    watcher = await Bus.connect(broker.settings("watcher"), name="watcher-1")
    job = one_node_job()
    try:
        for service in services:
            service.start()
        await wait_until_ready(watcher, SERVICES, 180.0)
        await trainer.publish(job)
        await trainer.publish(report_of(job, 0, job.initial_local_batch_sizes, (1000.0, 1000.0, 1000.0, 300.0)))
        subject = subjects.of("action", job.job)
        action = decode(Action, subject, await stored(watcher, ACTIONS.name, subject))
        subject = subjects.of("reward", job.job, NODE)
        reward = decode(Reward, subject, await stored(watcher, FEED.name, subject))
        heard = await trainer.newest(ACTIONS.name, subjects.of("action", job.job))
        assert decode(Action, heard.subject, heard.payload) == action
        assert action.local_batch_sizes[3] < action.local_batch_sizes[0]
        assert [rank.rank for rank in reward.ranks] == [0, 1, 2, 3]
        assert await denials(watcher) == dict.fromkeys(SERVICES, 0)

        fleet = Fleet(watcher)
        async with fleet.following():
            await fleet.known.wait()
            view = await fleet.open(job.job)
        assert (view.name, view.window, len(view.ranks)) == (job.job, 0, 4)
        assert [window.window for window in view.history] == [0]

        checks = await bus_checks(broker.settings("watcher"), configured=True)
        assert {check.name: check.present for check in checks} == {"broker": True, "streams": True, "services": True}
        unseen = await bus_checks(broker.settings("trainer"), configured=True)
        forbidden = {check.name: check.fix for check in unseen if not check.permitted}
        assert forbidden == dict.fromkeys(("streams", "services"), HOW_TO_LOOK)
        assert not any(check.permitted and not check.present for check in unseen)
        asked = [is_alive(broker.settings(name), name, environment(name)) for name in SERVICES]  # as each service
        assert all(await asyncio.gather(*asked))
        assert trainer.counters["permission_denials"] == watcher.counters["permission_denials"] == 0

        for name, value in bus_environment(broker.settings("watcher")).items():
            monkeypatch.setenv(name, value)
        arguments = ["capture", job.job, "--past", "-o", str(tmp_path / "job.dxc")]
        command = await asyncio.create_subprocess_exec(sys.executable, "-m", "dynamix.cli.main", *arguments)
        assert await command.wait() == 0
        kinds = {one.subject.split(".")[2] for one in capture.records(tmp_path / "job.dxc")}
        assert kinds == {"job", "report", "window", "state", "reward", "action"}
    finally:
        for service in services:
            service.stop()
        for bus in (trainer, watcher):
            await bus.close()
