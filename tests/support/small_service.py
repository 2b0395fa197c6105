"""A service of a few lines, run as a process: `python -m tests.support.small_service [--mode ...]`."""

import asyncio
import sys

import msgspec

from dynamix.runtime.service import Context, StartError, run


class SmallSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the tests change."""

    mode: str = "consume"
    """consume, fail, refuse, finish or ignore-stop."""


async def main(context: Context[SmallSettings]) -> None:
    if context.settings.mode == "fail":
        raise RuntimeError("made to fail")
    if context.settings.mode == "refuse":
        raise StartError("made to refuse: use another mode")
    if context.settings.mode == "finish":
        return
    if context.settings.mode == "ignore-stop":
        await asyncio.Event().wait()
    async with context.bus.consume("FEED", ["dynamix.v1.state.>"], start="all") as consumer:
        async for batch in consumer:
            for message in batch:
                context.count("states_seen")
                await context.bus.publish_bytes_soon(
                    "dynamix.v1.window.job.1.node-a", message.payload, f"window:{message.sequence}"
                )
    context.log.info("intake ended", stop=context.stop.is_set())


if __name__ == "__main__":
    sys.exit(run("collector", SmallSettings, main))
