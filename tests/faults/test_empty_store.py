"""Streams that are made again while a job runs: the job is steered on, without a restart of any service."""

import asyncio
import contextlib
import shutil

from tests.support import examples
from tests.support.brokers import connected
from tests.support.control_plane import control_plane, feed_windows, one_node_job

from dynamix.runtime.bus.provision import provision


async def test_a_running_job_is_steered_on_after_its_streams_were_made_again() -> None:
    """Its newest action may be applied, and said so, after the streams were made again that it was in."""
    async with control_plane("collector", "reward", "arbitrator") as plane:
        job = one_node_job(policy="rule")
        await plane.bus.publish(job)
        await feed_windows(plane, job, range(30))
        before = (await plane.wait_for_actions(30))[-1]
        assert before.window == 29
        await plane.server.kill()
        shutil.rmtree(plane.server._directory / "store")
        await plane.server.start()
        async with connected(plane.server.settings, "operator") as operator:
            await provision(operator)
        feeding = asyncio.create_task(feed_windows(plane, job, range(30, 1000), every_s=0.1))
        try:
            await plane.bus.publish(
                examples.applied(29, 31, local_batch_sizes=before.local_batch_sizes, action_hash=before.hash)
            )
            await asyncio.sleep(1.0)
            await plane.bus.publish(job)  # rank 0 looks every 10 s
            first, second, *_ = await plane.wait_for_actions(3)
        finally:
            feeding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await feeding
        assert (first.gap, first.previous_hash, second.gap) == (True, b"", False)
        assert 30 <= first.window <= 100
        assert second.window == first.window + 1
        assert all(process.exit_code() is None for process in plane.services.values())
