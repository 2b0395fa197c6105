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

ACTION_TIMEOUT_S = 60.0
"""The longest wait for an action. The services need milliseconds; a broker that restarts, seconds."""


class NoActionError(RuntimeError):
    """No action arrived in time; the message names services that may be missing."""


async def run_lockstep(
    cluster: VirtualCluster,
    bus: Bus,
    *,
    on_window: Callable[[list[Report]], None] | None = None,
    timeout_s: float = ACTION_TIMEOUT_S,
) -> list[Action]:
    """Run a cluster to its end and return all actions on its job; the job's name must be new on this bus.

    Args:
        cluster: not yet run. Its windows are computed in a thread, so that the connection stays alive meanwhile.
        bus: with an arbitrator, and a collector for each of the cluster's nodes.
        on_window: called with the reports of each window.
        timeout_s: the longest wait for an action.

    Raises:
        NoActionError: when an action does not come.
        BusError: when the broker refuses a message, or does not answer.
    """
    lag, num_applied = max(cluster.scenario.lag_windows, 1), 0
    actions: list[Action] = []
    newest_traces = {node.node: -1 for node in cluster.job.nodes}
    await bus.publish(cluster.job)
    async with contextlib.AsyncExitStack() as stack:
        decided = bus.consume(ACTIONS.name, [subjects.of("action", cluster.job.job)], start="all")
        batches = aiter(await stack.enter_async_context(decided))
        traces = None
        if cluster.job.policy == STIGMERGY:
            left = bus.consume(FEED.name, [subjects.of("trace", cluster.job.job, subjects.ANY)], start="all")
            traces = aiter(await stack.enter_async_context(left))

        async def wait_for(window: int) -> None:
            """Pass on actions, and agents' traces, until those of a window, or of a later one, were handed over."""
            try:
                async with asyncio.timeout(timeout_s):
                    while window >= 0 and (not actions or actions[-1].window < window):
                        for message in await anext(batches):
                            actions.append(decode(Action, message.subject, message.payload))
                            cluster.offer(actions[-1])
                    while traces is not None and min(newest_traces.values()) < window:
                        for message in await anext(traces):
                            trace = decode(Trace, message.subject, message.payload)
                            newest_traces[trace.node] = trace.window
                            cluster.leave_trace(trace)
            except (TimeoutError, StopAsyncIteration):
                first, last = cluster.job.nodes[0].node, cluster.job.nodes[-1].node
                missing = "no action" if not actions or actions[-1].window < window else "not every trace"
                raise NoActionError(
                    f"{missing} for window {window} of {cluster.job.job} in {timeout_s:g} s: are the arbitrator and a "
                    f"collector for each node (DYNAMIX_NODE={first} ... {last}) running?"
                ) from None

        while not cluster.over:
            await wait_for(cluster.window - lag)
            reports = await asyncio.to_thread(cluster.run_window)
            adopted, num_applied = cluster.applied[num_applied:], len(cluster.applied)
            await asyncio.gather(*[bus.publish(message) for message in (*adopted, *reports)])
            if on_window is not None:
                on_window(reports)
        await wait_for(cluster.window - 1)
    await bus.publish(msgspec.structs.replace(cluster.job, phase="ended", end_reason="completed"))
    return actions
