"""What our bus costs beside the bare client: `python -m bench.bus [--json FILE] [--pairs N]`, about half a minute.

One broker, one process, uvloop, a state message of 8 ranks. Each comparison runs ours and bare nats-py in pairs and is
judged by the median of the pairs' ratios.

consume  `Bus.consume` and `codec.decode` against a pipelined pull written by hand (`bench.messages.readers`): the SAME
         stored messages with their headers, decoded with the same codec in the callback.
publish  `Bus.publish_bytes_soon` against core publishing of the same bytes, subjects and headers with a reply
         subject, whose acknowledgements are counted. Ours keeps each message until it is acknowledged and would
         publish it again; the bare client loses what is lost.
publish, encoding  `Bus.publish_soon`, which also encodes the message and builds subject and identity, against the same
         publishing of bytes made beforehand. For information: it charges the codec to the bus.
"""

import asyncio
import itertools
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from bench.harness.broker import broker_with_bus, raw_client, run_with_uvloop
from bench.harness.command import BenchmarkReport, Target, benchmark_parser, run_benchmark
from bench.harness.rounds import Rounds, Timed
from bench.harness.tables import formatted
from bench.messages.load import RANKS_PER_NODE, Load, Parcel, job_of, parcel
from bench.messages.readers import read_raw, read_with_bus
from nats.aio.client import Client
from nats.aio.msg import Msg

from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.messages import State

STATES = subjects.of("state", subjects.ANY, subjects.ANY)
NUM_MESSAGES = 10_000
CONSUMED_PER_PUBLISHED = 2
"""Consuming is faster: with twice as many its runs are about as long."""
TARGET = 0.6
FLUSH_S = 60.0

COLUMNS = {
    "": "{name}",
    "ours/s": "{ours_per_s:.0f}",
    "raw/s": "{raw_per_s:.0f}",
    "ratio": "{ratio:.2f}",
    "range": "{ratio_min:.2f}-{ratio_max:.2f}",
    "CPU us ours/raw": "{ours_cpu_us:.1f} / {raw_cpu_us:.1f}",
}

Arm = Callable[[], Awaitable[None]]


class BusArms:
    """The arms, over one broker."""

    def __init__(self, bus: Bus, raw: Client, num_published: int) -> None:
        self.num_published = num_published
        self.num_consumed = CONSUMED_PER_PUBLISHED * num_published
        self._bus = bus
        self._raw = raw
        self._generations = itertools.count(1)
        self._state = next(Load(job_of("bench-0a1b2c3d", RANKS_PER_NODE, "static")).states(0))
        self._states: list[State] = []
        self._parcels: list[Parcel] = []

    @property
    def message_bytes(self) -> int:
        """Size of one state."""
        return len(parcel(self._state).payload)

    def prepare(self, num_messages: int) -> None:
        """Messages that the stream has not seen: an equal identity would be dropped as a duplicate, and cost less."""
        unseen = msgspec.structs.replace(self._state, generation=next(self._generations))
        self._states = [msgspec.structs.replace(unseen, window=window) for window in range(num_messages)]
        self._parcels = [parcel(state) for state in self._states]

    async def publish_ours(self) -> None:
        """Our pipelined publishing of bytes."""
        for one in self._parcels:
            await self._bus.publish_bytes_soon(*one)
        assert await self._bus.flush(FLUSH_S)

    async def publish_messages(self) -> None:
        """Our pipelined publishing of messages."""
        for message in self._states:
            await self._bus.publish_soon(message)
        assert await self._bus.flush(FLUSH_S)

    async def publish_raw(self) -> None:
        """Core publishing of the same bytes and headers; counts acknowledgements."""
        inbox, done = self._raw.new_inbox(), asyncio.Event()
        missing = len(self._parcels)

        async def count(_message: Msg) -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                done.set()

        subscription = await self._raw.subscribe(inbox, cb=count)
        for subject, payload, message_id in self._parcels:
            await self._raw.publish(subject, payload, inbox, {"Nats-Msg-Id": message_id})
        await done.wait()
        await subscription.unsubscribe()

    async def consume_ours(self) -> None:
        """Our consumer, decoding."""
        await read_with_bus(self._bus, STATES, self.num_consumed, first=1)

    async def consume_raw(self) -> None:
        """A pipelined pull by hand, decoding."""
        await read_raw(self._raw, STATES, self.num_consumed, first=1)


async def compare(  # noqa: PLR0917 - a row of a table
    arms: BusArms, name: str, ours: Arm, raw: Arm, num_messages: int, target: float | None, num_pairs: int
) -> dict[str, Any]:
    """One row: pairs of ours and raw."""
    rounds = Rounds(("ours", "raw"), num_pairs, label=name)
    for arm in rounds:
        arms.prepare(arms.num_published)
        with Timed(num_messages) as done:
            await (ours if arm == "ours" else raw)()
        rounds.record(done.timing)
    row: dict[str, Any] = {"name": name, "num_messages": num_messages, "target": target}
    per_s, cpu_us = rounds.medians("per_s"), rounds.medians("cpu_us")
    for arm in per_s:
        row |= {f"{arm}_per_s": per_s[arm], f"{arm}_cpu_us": cpu_us[arm]}
    return row | rounds.ratios("per_s")


async def measure(num_pairs: int, num_messages: int) -> BenchmarkReport:
    """All comparisons over one broker."""
    async with broker_with_bus("bench") as (server, bus), raw_client(server.settings) as raw:
        arms = BusArms(bus, raw, num_messages)
        arms.prepare(arms.num_consumed)
        await arms.publish_ours()  # what `consume` reads
        table: list[tuple[str, Arm, Arm, int, float | None]] = [
            ("consume", arms.consume_ours, arms.consume_raw, arms.num_consumed, TARGET),
            ("publish", arms.publish_ours, arms.publish_raw, num_messages, TARGET),
            ("publish, encoding", arms.publish_messages, arms.publish_raw, num_messages, None),
        ]
        rows = [await compare(arms, *row, num_pairs) for row in table]
        sizes = {"message_bytes": arms.message_bytes, "num_ranks": RANKS_PER_NODE, "retries": bus.counters["retries"]}
    targets = [
        Target(name=f"{row['name']}, ratio", value=row["ratio"], at_least=TARGET) for row in rows if row["target"]
    ]
    title = f"state of {RANKS_PER_NODE} ranks, {sizes['message_bytes']} bytes; {sizes['retries']} retries\n"
    return BenchmarkReport({**sizes, "comparisons": rows}, title + formatted(rows, COLUMNS), targets)


def main() -> int:
    """Run from the command line; exit code 1 when a target is missed."""
    parser = benchmark_parser(
        *("bus", __doc__),
        ("--pairs", 9, "pairs per comparison"),
        ("--messages", NUM_MESSAGES, "published per run; consumed are twice as many"),
    )
    options = parser.parse_args()
    if options.pairs < 1 or options.messages < 1:
        parser.error("--pairs and --messages must be at least 1")
    return run_benchmark("bus", options, lambda: run_with_uvloop(measure(options.pairs, options.messages)))


if __name__ == "__main__":
    sys.exit(main())
