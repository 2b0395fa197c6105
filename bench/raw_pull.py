"""A pipelined pull written by hand on raw nats-py: what a reader of a stream costs at least in this language."""

import asyncio
import itertools
import json
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.msg import Msg

BATCH = 512
INACTIVE_THRESHOLD_NS = 5 * 10**9
REQUEST_EXPIRES_NS = 30 * 10**9

_names = itertools.count(1)


async def pull(
    client: Client, stream: str, subject: str, num_messages: int, take: Callable[[Msg], object], *, first: int = 1
) -> None:
    """Hand so many stored messages, from sequence `first` on, with their headers, to `take`.

    Two requests of `BATCH` are always open, so that the broker never waits for us.
    """
    inbox, done, name = client.new_inbox(), asyncio.Event(), f"raw-{next(_names)}"
    missing, asked = num_messages, 0

    async def ask() -> None:
        nonlocal asked
        asked += BATCH
        request = {"batch": BATCH, "expires": REQUEST_EXPIRES_NS}
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", json.dumps(request).encode(), inbox)

    async def on_message(message: Msg) -> None:
        nonlocal missing, asked
        if not message.reply:
            return  # a request that ended
        take(message)
        missing -= 1
        asked -= 1
        if missing == 0:
            done.set()
        elif asked <= BATCH:
            await ask()

    subscription = await client.subscribe(inbox, cb=on_message)
    await _create(client, stream, subject, name, first)
    await ask()
    await ask()
    await done.wait()
    await subscription.unsubscribe()


async def _create(client: Client, stream: str, subject: str, name: str, first: int) -> None:
    config = {
        "name": name,
        "ack_policy": "none",
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": first,
        "mem_storage": True,
        "inactive_threshold": INACTIVE_THRESHOLD_NS,
        "filter_subject": subject,
    }
    body = json.dumps({"stream_name": stream, "config": config}).encode()
    answer = json.loads((await client.request(f"$JS.API.CONSUMER.CREATE.{stream}.{name}", body, timeout=5)).data)
    if "error" in answer:
        raise RuntimeError(f"the broker makes no consumer of {stream}: {answer['error']}")
