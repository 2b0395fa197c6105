"""`dynamix dashboard` with a watcher's key, who may publish nothing."""

import asyncio

from tests.support import examples
from tests.support.deployed_broker import DeployedBroker

from dynamix.cli.fleet import Fleet
from dynamix.runtime.bus import Bus


async def test_a_watcher_may_follow_all_jobs(broker: DeployedBroker) -> None:
    for user, message in (
        ("trainer", examples.job()),
        ("collector", examples.window()),
        ("arbitrator", examples.action(0, hash=bytes(32))),
    ):
        bus = await Bus.connect(broker.settings(user), name="test-1")
        await bus.publish(message)
        await bus.close()
    watcher = await Bus.connect(broker.settings("watcher"), name="test-2")
    fleet = Fleet(watcher)
    following = asyncio.create_task(fleet.follow())
    async with asyncio.timeout(30):
        while not fleet.jobs or fleet.jobs[examples.JOB].window < 0:
            await fleet.news.wait()
        view = await fleet.open(examples.JOB)
    assert view is not None
    assert view.action is not None
    assert [point.window for point in view.history] == [0]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await watcher.close()
