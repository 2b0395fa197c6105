"""Readers of states in a stream: our bus with our codec, and a pipelined pull written by hand on bare nats-py.

The pull is what reading a stream costs at least in this language: two requests of `BATCH` messages are always open, so
that the broker never waits. Both readers decode every message with the same codec.
"""

import asyncio
import itertools
import json
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from dynamix.runtime.bus import Bus
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import State
from dynamix.schemas.streams import FEED

BATCH = 512
INACTIVE_THRESHOLD_NS = 5 * 10**9
REQUEST_EXPIRES_NS = 30 * 10**9
RAW_TIMEOUT_S = 120.0

_names = itertools.count(1)


async def read_with_bus(bus: Bus, subject: str, num_states: int, *, first: int) -> None:
    """Read so many states of `subject` from sequence `first` on, as a service does."""
    async with bus.consume(FEED.name, [subject], start=first) as consumer:
        async for batch in consumer:
            for message in batch:
                decode(State, message.subject, message.payload)
            num_states -= len(batch)
            if num_states <= 0:
                return


async def read_raw(client: Client, subject: str, num_states: int, *, first: int) -> None:
    """Read the same states by hand; as many as are asked for must be there."""
    inbox, done, name = client.new_inbox(), asyncio.Event(), f"raw-{next(_names)}"
    missing, asked = num_states, 0

    async def ask() -> None:
        nonlocal asked
        asked += BATCH
        request = {"batch": BATCH, "expires": REQUEST_EXPIRES_NS}
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{FEED.name}.{name}", json.dumps(request).encode(), inbox)

    async def on_message(message: Msg) -> None:
        nonlocal missing, asked
        if not message.reply:
            return  # a request that ended
        decode(State, message.subject, message.data)
        missing -= 1
        asked -= 1
        if missing == 0:
            done.set()
        elif asked <= BATCH:
            await ask()

    subscription = await client.subscribe(inbox, cb=on_message)
    await _create_consumer(client, subject, name, first)
    await ask()
    await ask()
    async with asyncio.timeout(RAW_TIMEOUT_S):
        await done.wait()
    await subscription.unsubscribe()


async def _create_consumer(client: Client, subject: str, name: str, first: int) -> None:
    config: dict[str, Any] = {
        "name": name,
        "ack_policy": "none",
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": first,
        "mem_storage": True,
        "inactive_threshold": INACTIVE_THRESHOLD_NS,
        "filter_subject": subject,
    }
    body = json.dumps({"stream_name": FEED.name, "config": config}).encode()
    reply = await client.request(f"$JS.API.CONSUMER.CREATE.{FEED.name}.{name}", body, timeout=5)
    if error := json.loads(reply.data).get("error"):
        raise RuntimeError(f"the broker makes no consumer of {FEED.name}: {error}")
