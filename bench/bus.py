"""What our bus costs beside the bare client: `python -m bench.bus [--json FILE] [--pairs N]`, about half a minute.

One broker, one process, uvloop, a state message of 8 ranks. Each comparison alternates ours and raw nats-py (ABBA), so
that both see the same machine, and is judged by the median of the pairs' ratios.

consume  `Bus.consume` and `codec.decode` against a pipelined pull written by hand on raw nats-py: the SAME stored
         messages with their headers, decoded with the same codec in the callback.
publish  `Bus.publish_bytes_soon` against raw core publishing of the same bytes, subjects and headers with a reply
         subject, whose acknowledgements are counted. Ours keeps each message until it is acknowledged and would send
         it again; raw loses what is lost.
publish, encoding  `Bus.publish_soon`, which also encodes the message and builds subject and identity, against the same
         raw publishing of bytes made beforehand. For information: it charges the codec to the bus.
"""

import argparse
import asyncio
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
import nats
import uvloop
from bench.node_window import NUM_RANKS, metric_window
from bench.output import add_output_arguments, exit_code, write_json
from bench.raw_pull import pull
from nats.aio.client import Client
from nats.aio.msg import Msg

from dynamix.runtime.bus import ALL, Bus
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.runtime.provision import provision
from dynamix.schemas import codec, subjects
from dynamix.schemas.features import state_of
from dynamix.schemas.messages import State

STATES = "dynamix.v1.state.>"
NUM_MESSAGES = 10_000
CONSUMED_PER_PUBLISHED = 2
"""Consuming is faster: with twice as many its runs are about as long."""
TARGET = 0.6

Arm = Callable[[], Awaitable[None]]


class Sample(NamedTuple):
    """One run of one arm."""

    per_s: float
    cpu_us: float
    """CPU time of this process per message."""


class Comparison(NamedTuple):
    """One row of the result."""

    name: str
    num_messages: int
    ours: Arm
    raw: Arm
    target: float | None


class Bench:
    """The arms, over one broker."""

    def __init__(self, bus: Bus, raw: Client, num_published: int) -> None:
        self.num_published = num_published
        self._num_consumed = CONSUMED_PER_PUBLISHED * num_published
        self._bus = bus
        self._raw = raw
        self._generations = itertools.count(1)
        self._states: list[State] = []
        self._encoded: list[tuple[str, bytes, str]] = []

    def comparisons(self) -> list[Comparison]:
        """All rows."""
        return [
            Comparison("consume", self._num_consumed, self.consume_ours, self.consume_raw, TARGET),
            Comparison("publish", self.num_published, self.publish_ours, self.publish_raw, TARGET),
            Comparison("publish, encoding", self.num_published, self.publish_messages, self.publish_raw, None),
        ]

    async def store(self) -> None:
        """Fill the stream with what `consume` reads."""
        self.prepare(self._num_consumed)
        await self.publish_ours()

    def prepare(self, num_messages: int) -> None:
        """Messages that the stream has not seen: an equal identity would be dropped as a duplicate, and cost less."""
        generation = next(self._generations)
        state = state_of(metric_window())
        self._states = [
            msgspec.structs.replace(state, generation=generation, window=window) for window in range(num_messages)
        ]
        self._encoded = [
            (subjects.subject_of(message), codec.encode(message), codec.message_id(message)) for message in self._states
        ]

    async def publish_ours(self) -> None:
        """Our pipelined publishing of bytes."""
        for subject, payload, message_id in self._encoded:
            await self._bus.publish_bytes_soon(subject, payload, message_id)
        assert await self._bus.flush(60)

    async def publish_messages(self) -> None:
        """Our pipelined publishing of messages."""
        for message in self._states:
            await self._bus.publish_soon(message)
        assert await self._bus.flush(60)

    async def publish_raw(self) -> None:
        """Core publishing of the same bytes and headers; counts acknowledgements."""
        inbox, done = self._raw.new_inbox(), asyncio.Event()
        missing = len(self._encoded)

        async def count(_message: Msg) -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                done.set()

        subscription = await self._raw.subscribe(inbox, cb=count)
        for subject, payload, message_id in self._encoded:
            await self._raw.publish(subject, payload, inbox, {"Nats-Msg-Id": message_id})
        await done.wait()
        await subscription.unsubscribe()

    async def consume_ours(self) -> None:
        """Our consumer, decoding."""
        missing = self._num_consumed
        async with self._bus.consume("FEED", [STATES], start=ALL) as consumer:
            async for batch in consumer:
                for message in batch:
                    codec.decode(State, message.subject, message.payload)
                missing -= len(batch)
                if missing <= 0:
                    return

    async def consume_raw(self) -> None:
        """A pipelined pull by hand, decoding."""
        await pull(self._raw, "FEED", STATES, self._num_consumed, _decode)


def _decode(message: Msg) -> None:
    codec.decode(State, message.subject, message.data)


async def measure(arm: Arm, num_messages: int) -> Sample:
    """Run an arm once."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    await arm()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(num_messages / wall, cpu / num_messages * 1e6)


async def compare(bench: Bench, comparison: Comparison, num_pairs: int) -> dict[str, Any]:
    """Pairs of ours and raw, in alternating order."""
    ours: list[Sample] = []
    raw: list[Sample] = []
    arms = ((ours, comparison.ours), (raw, comparison.raw))
    for pair in range(-1, num_pairs):  # the first one warms up
        for samples, arm in arms if pair % 2 else reversed(arms):
            bench.prepare(bench.num_published)
            sample = await measure(arm, comparison.num_messages)
            if pair >= 0:
                samples.append(sample)
        print(f"\r{comparison.name}: pair {pair + 1} of {num_pairs}   ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return summary(comparison, ours, raw)


def summary(comparison: Comparison, ours: list[Sample], raw: list[Sample]) -> dict[str, Any]:
    """Medians and spread of one comparison."""
    ratios = sorted(our.per_s / their.per_s for our, their in zip(ours, raw, strict=True))
    ratio = statistics.median(ratios)
    return {
        "name": comparison.name,
        "num_messages": comparison.num_messages,
        "num_pairs": len(ratios),
        "ours_per_s": statistics.median(sample.per_s for sample in ours),
        "raw_per_s": statistics.median(sample.per_s for sample in raw),
        "ours_cpu_us": statistics.median(sample.cpu_us for sample in ours),
        "raw_cpu_us": statistics.median(sample.cpu_us for sample in raw),
        "ratio": ratio,
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "target": comparison.target,
        "met": comparison.target is None or ratio >= comparison.target,
    }


async def run(num_pairs: int, num_messages: int) -> dict[str, Any]:
    """All comparisons over one broker."""
    async with EmbeddedServer() as server:
        settings = server.settings
        bus = await Bus.connect(settings, name="bench")
        raw = await nats.connect(settings.url, user=settings.user, password=settings.password)
        try:
            await provision(bus)
            bench = Bench(bus, raw, num_messages)
            await bench.store()
            rows = [await compare(bench, comparison, num_pairs) for comparison in bench.comparisons()]
            retries = bus.counters["retries"]
        finally:
            await raw.close()
            await bus.close()
    size = len(codec.encode(state_of(metric_window())))
    return {"message_bytes": size, "num_ranks": NUM_RANKS, "retries": retries, "comparisons": rows}


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    print(f"\nstate of {result['num_ranks']} ranks, {result['message_bytes']} bytes; {result['retries']} retries")
    print(f"{'':<18}{'ours/s':>9}{'raw/s':>9}{'ratio':>7}  {'range':<12}{'CPU us ours/raw':>16}  target")
    for row in result["comparisons"]:
        spread = f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}"
        cpu = f"{row['ours_cpu_us']:.1f} / {row['raw_cpu_us']:.1f}"
        target = "-" if row["target"] is None else f">= {row['target']} {'met' if row['met'] else 'MISSED'}"
        print(
            f"{row['name']:<18}{row['ours_per_s']:>9.0f}{row['raw_per_s']:>9.0f}{row['ratio']:>7.2f}  "
            f"{spread:<12}{cpu:>16}  {target}"
        )


def main() -> int:
    """Run from the command line; exit code 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9, help="pairs per comparison (default 9)")
    parser.add_argument(
        "--messages",
        type=int,
        default=NUM_MESSAGES,
        help=f"published per run (default {NUM_MESSAGES}); consumed: twice",
    )
    add_output_arguments(parser)
    options = parser.parse_args()
    if options.pairs < 1 or options.messages < 1:
        parser.error("--pairs and --messages must be at least 1")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(run(options.pairs, options.messages))
    if options.json != "-":
        show(result)
    write_json(result, options.json)
    missed = [row["name"] for row in result["comparisons"] if not row["met"]]
    return exit_code("bus", missed, options)


if __name__ == "__main__":
    sys.exit(main())
