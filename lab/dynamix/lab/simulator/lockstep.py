"""A virtual cluster on the bus: the real services steer it, and it waits for them.

A real job never waits, so what it does depends on how fast the services answer. A virtual one has the action of window
t before it reports window t + lag, in which that action's sizes are pending, and therefore goes the same way on every
machine, and without a bus.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dynamix.runtime.bus import Bus, BusMessage
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Report, Trace
from dynamix.schemas.messages.policies import STIGMERGY
from dynamix.schemas.streams import ACTIONS, FEED

from .cluster import VirtualCluster

ACTION_TIMEOUT_S = 60.0
"""The longest wait for an action. The services need milliseconds; a broker that restarts, seconds."""


class NoActionError(RuntimeError):
    """No action arrived in time; the text says which services may be missing."""


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
    await bus.publish(cluster.job)
    consumed = bus.consume(ACTIONS.name, [subjects.of("action", cluster.job.job)], start="all")
    async with consumed as consumer, _traces_of(cluster, bus) as traces:
        batches = aiter(consumer)

        async def wait_for(window: int) -> None:
            """Pass actions on until that of a window, or of a later one, was offered; a negative window has none."""
            try:
                async with asyncio.timeout(timeout_s):
                    while window >= 0 and (not actions or actions[-1].window < window):
                        for message in await anext(batches):
                            actions.append(decode(Action, message.subject, message.payload))
                            cluster.offer(actions[-1])
                    await traces.wait_for(window)
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
    await bus.publish(cluster.ended())
    return actions


class _Traces:
    """Passes on what the agents of a job leave; there is nothing to wait for where a centre decides."""

    def __init__(self, cluster: VirtualCluster, batches: AsyncIterator[list[BusMessage]] | None) -> None:
        self._cluster = cluster
        self._batches = batches
        self._newest = {node.node: -1 for node in cluster.job.nodes}

    async def wait_for(self, window: int) -> None:
        """Return once the traces of a window, or later ones, of all nodes were handed over."""
        while self._batches is not None and min(self._newest.values()) < window:
            for message in await anext(self._batches):
                trace = decode(Trace, message.subject, message.payload)
                self._newest[trace.node] = trace.window
                self._cluster.leave_trace(trace)


@asynccontextmanager
async def _traces_of(cluster: VirtualCluster, bus: Bus) -> AsyncIterator[_Traces]:
    if cluster.job.policy != STIGMERGY:
        yield _Traces(cluster, None)
        return
    subject = subjects.of("trace", cluster.job.job, subjects.ANY)
    async with bus.consume(FEED.name, [subject], start="all") as consumer:
        yield _Traces(cluster, aiter(consumer))
