"""A virtual cluster on the bus: the real services steer it, and it waits for them.

A real job never waits, so what it does depends on how fast the services answer. A virtual one has the action of window
t before it reports window t + lag, in which that action's sizes are pending, and therefore goes the same way on every
machine, and without a bus.
"""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Report, Trace
from dynamix.schemas.policies import STIGMERGY
from dynamix.schemas.streams import ACTIONS, FEED

TIMEOUT_S = 60.0
"""The longest wait for an action. The services need milliseconds; a broker that restarts, seconds."""


async def run_lockstep(
    cluster: VirtualCluster, bus: Bus, *, on_window: Callable[[list[Report]], None] = lambda _: None
) -> list[Action]:
    """Run a cluster to its end and return all actions on its job; the job's name must be new on this bus.

    Args:
        cluster: not yet run. Its windows are computed in a thread, so that the connection stays alive meanwhile.
        bus: with an arbitrator, and a collector for each of the cluster's nodes.
        on_window: called with the reports of each window.
    """
    job, lag, num_applied = cluster.job, max(cluster.scenario.lag_windows, 1), 0
    actions: list[Action] = []
    newest_traces = {node.node: -1 for node in job.nodes} if job.policy == STIGMERGY else {}
    await bus.publish(job)
    decided = bus.consume(ACTIONS.name, [subjects.of("action", job.job)], start="all")
    left = bus.consume(FEED.name, [subjects.of("trace", job.job, subjects.ANY)], start="all")
    async with contextlib.AsyncExitStack() as stack:
        batches, traces = [aiter(await stack.enter_async_context(reading)) for reading in (decided, left)]

        async def wait_for(window: int) -> None:
            """Pass on actions, and agents' traces, until those of a window, or of a later one, were handed over."""
            async with asyncio.timeout(TIMEOUT_S):
                while window >= 0 and (not actions or actions[-1].window < window):
                    for message in await anext(batches):
                        actions.append(decode(Action, message.subject, message.payload))
                        cluster.offer(actions[-1])
                while min(newest_traces.values(), default=window) < window:
                    for message in await anext(traces):
                        trace = decode(Trace, message.subject, message.payload)
                        newest_traces[trace.node] = trace.window
                        cluster.leave_trace(trace)

        while not cluster.over:
            await wait_for(cluster.window - lag)
            reports = await asyncio.to_thread(cluster.run_window)
            adopted, num_applied = cluster.applied[num_applied:], len(cluster.applied)
            await asyncio.gather(*[bus.publish(message) for message in (*adopted, *reports)])
            on_window(reports)
        await wait_for(cluster.window - 1)
    await bus.publish(msgspec.structs.replace(job, phase="ended", end_reason="completed"))
    return actions
