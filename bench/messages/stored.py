"""What a stream holds of a subject, as a whole: for those who compare it with what was sent."""

from dynamix.runtime.bus import Bus, BusMessage


async def stored_messages(bus: Bus, stream: str, subject: str) -> list[BusMessage]:
    """All messages of a subject or filter, up to the newest one now."""
    newest, found = await bus.last(stream, subject), list[BusMessage]()
    if newest is None:
        return found
    async with bus.consume(stream, [subject], start="all") as consumer:
        async for batch in consumer:
            found += batch
            if batch[-1].sequence >= newest.sequence:
                break
    return found
