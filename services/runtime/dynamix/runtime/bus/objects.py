"""Whole files on the bus: object stores in the standard layout, written in one piece and read by our own reader.

nats-py's reader takes an ordered consumer, which can stall in silence, and adds chunk to chunk in quadratic time; this
one bridges lost connections, with a limit for the size and a check of the digest.
"""

import asyncio
import collections
import contextlib
import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from . import object_layout as layout
from .errors import (
    BusError,
    ConnectionClosedError,
    ObjectBrokenError,
    ObjectMissingError,
    StaleWriterError,
)
from .object_layout import ObjectInfo
from .publish import Publisher
from .read import Reader, Start
from .requests import BusMessage, Requests, count_messages, last_message, purge_subject

logger = logging.getLogger(__name__)

MAX_OBJECT_BYTES = 64 << 20
"""What is larger belongs into a file system."""
MAX_CHUNKS_IN_FLIGHT = 16
"""2 MB on their way: enough to keep the line busy, too little to delay other messages of this connection."""
STALL_TIMEOUT_S = 60.0
"""How long a transfer may stand still: as long as a request waits for a broker that restarts."""
CLEAN_UP_TIMEOUT_S = 5.0
ROLLUP = {"Nats-Rollup": "sub"}
"""A description replaces its predecessor."""


Consume = Callable[[str, Sequence[str], Start], Reader]
"""Makes a reader of some subjects of a stream."""


class StoredObject(NamedTuple):
    """An object as read: its digest is that of its description."""

    info: ObjectInfo
    data: bytes


class Objects:
    """The object stores of one connection: `bus.objects`."""

    def __init__(self, requests: Requests, publisher: Publisher, consume: Consume) -> None:
        self._requests = requests
        self._publisher = publisher
        self._consume = consume

    async def put(
        self,
        bucket: str,
        name: str,
        data: bytes,
        *,
        metadata: Mapping[str, str] | None = None,
        create_only: bool = False,
    ) -> ObjectInfo:
        """Store an object: all of its chunks, then the description that makes it visible.

        It is seen whole or not at all; the chunks of what it replaces are removed. With `create_only` a name that was
        ever used, also by a deleted object, is never used again: of several writers one succeeds.

        Raises:
            StaleWriterError: when another writer has written this name since, or before with `create_only`.
            ValueError: when `data` is over 64 MiB, or bucket or name is invalid.
            StreamMissingError: when there is no such bucket.
            BusError: as `Bus.publish`.
        """
        if len(data) > MAX_OBJECT_BYTES:
            raise ValueError(f"object {name!r} of {len(data)} bytes is over the limit of {MAX_OBJECT_BYTES}")
        stream, subject = layout.stream_of(bucket), layout.description_subject(bucket, name)
        before = await last_message(self._requests, stream, subject)
        if before is not None and create_only:
            raise StaleWriterError(f"bucket {bucket} has an object {name!r} already", before.sequence)
        nuid = secrets.token_hex(11)  # 22 characters, as the official clients make them
        chunks = layout.chunk_subject(bucket, nuid)
        try:
            sha256 = await self._upload(chunks, nuid, data)
        except BaseException:
            await self._clean_up(stream, chunks)
            raise
        info = layout.describe_object(bucket, name, nuid=nuid, size=len(data), sha256=sha256, metadata=metadata or {})
        try:
            await self._describe(stream, subject, info, expected_last=0 if before is None else before.sequence)
        except StaleWriterError:  # any other error leaves open whether the description was stored: leave its chunks
            await self._clean_up(stream, chunks)
            raise
        if before is not None:
            with contextlib.suppress(ObjectBrokenError):  # an unreadable description names no chunks
                await self._clean_up(stream, layout.chunk_subject(bucket, layout.read_description(before.payload).nuid))
        return info

    async def get(self, bucket: str, name: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> StoredObject:
        """Read an object whole, with its digest checked. Broker restarts are bridged.

        Raises:
            ObjectMissingError: when there is none of this name.
            ObjectBrokenError: when it is truncated, over `max_bytes`, a link, or not of its digest.
            StreamMissingError: when there is no such bucket.
            BusError: when nothing more comes for 60 s.
        """
        info = await self.info(bucket, name)
        while True:
            if info is None or info.deleted:
                raise ObjectMissingError(f"bucket {bucket} has no object {name!r}")
            try:
                return StoredObject(info, await self._read(bucket, info, max_bytes))
            except ObjectBrokenError:
                newer = await self.info(bucket, name)
                if newer is None or newer.nuid == info.nuid:
                    raise
                info = newer  # replaced during the read

    async def info(self, bucket: str, name: str) -> ObjectInfo | None:
        """What is written about an object, also about a deleted one; `None` when there is nothing."""
        stream, subject = layout.stream_of(bucket), layout.description_subject(bucket, name)
        message = await last_message(self._requests, stream, subject)
        return None if message is None else _described(bucket, message)

    async def list_all(self, bucket: str) -> list[ObjectInfo]:
        """What is written about all objects of a bucket, also about deleted ones, sorted by name."""
        stream, subjects = layout.stream_of(bucket), layout.all_descriptions(bucket)
        newest = await last_message(self._requests, stream, subjects)
        found: dict[str, ObjectInfo] = {}
        if newest is None:
            return []
        async with self._consume(stream, [subjects], "last_per_subject") as consumer:
            while True:
                batch = await _next(consumer)
                for message in batch:
                    try:
                        info = _described(bucket, message)
                        found[info.name] = info
                    except ObjectBrokenError as error:
                        logger.warning("skipped in bucket %s: %s", bucket, error)
                if batch[-1].num_pending == 0 or batch[-1].sequence >= newest.sequence:
                    return sorted(found.values(), key=lambda info: info.name)

    async def delete(self, bucket: str, name: str) -> None:
        """Remove an object; its description stays and says so. Harmless when there is none.

        Raises:
            StaleWriterError: when another writer has written this name meanwhile.
            BusError: as `Bus.publish`.
        """
        stream, subject = layout.stream_of(bucket), layout.description_subject(bucket, name)
        last = await last_message(self._requests, stream, subject)
        info = None if last is None else layout.read_description(last.payload)
        if last is None or info is None or info.deleted:
            return
        await self._describe(stream, subject, layout.describe_deleted(info), expected_last=last.sequence)
        await self._clean_up(stream, layout.chunk_subject(bucket, info.nuid))

    async def _upload(self, subject: str, nuid: str, data: bytes) -> bytes:
        """Publish the chunks in order, a few ahead of their acknowledgements; returns the digest of the whole."""
        on_the_way: collections.deque[asyncio.Future[int]] = collections.deque()
        digest = hashlib.sha256()
        try:
            for index, start in enumerate(range(0, len(data), layout.CHUNK_BYTES)):
                if len(on_the_way) >= MAX_CHUNKS_IN_FLIGHT:
                    await on_the_way.popleft()
                chunk = data[start : start + layout.CHUNK_BYTES]
                on_the_way.append(await self._publisher.publish(subject, chunk, f"{nuid}:{index}"))
                digest.update(chunk)  # while the broker is busy with it
            await asyncio.gather(*on_the_way)
        except BusError:
            await asyncio.gather(*on_the_way, return_exceptions=True)  # or some are stored after the cleaning up
            raise
        except BaseException:
            for future in on_the_way:
                future.cancel()
            raise
        return digest.digest()

    async def _describe(self, stream: str, subject: str, info: ObjectInfo, *, expected_last: int) -> None:
        payload = msgspec.json.encode(info)
        try:
            await (
                await self._publisher.publish(subject, payload, f"{info.nuid}:{info.deleted}", expected_last, ROLLUP)
            )
        except StaleWriterError:
            # a retry that comes when the broker has forgotten the first try's identity
            last = await last_message(self._requests, stream, subject)
            if last is None or last.payload != payload:
                raise

    async def _clean_up(self, stream: str, subject: str) -> None:
        """Free the room of chunks that nothing describes; they are harmless if that fails."""
        try:
            async with asyncio.timeout(CLEAN_UP_TIMEOUT_S):
                await purge_subject(self._requests, stream, subject)
        except (BusError, TimeoutError) as error:
            logger.warning("chunks on %s are left behind: %s", subject, error)

    async def _read(self, bucket: str, info: ObjectInfo, max_bytes: int) -> bytes:
        """The bytes behind a description: exactly so many, with its digest."""
        name = f"object {info.name!r} in bucket {bucket}"
        if info.options is not None and info.options.link is not None:
            raise ObjectBrokenError(f"{name} only points to another one: get that one")
        if info.size > max_bytes:
            raise ObjectBrokenError(f"{name} has {info.size} bytes, over the limit of {max_bytes}")
        expected = info.sha256
        digest = hashlib.sha256()
        data = await self._read_chunks(bucket, info, name, digest.update) if info.size or info.chunks else b""
        if digest.digest() != expected:
            raise ObjectBrokenError(f"{name} does not have the digest that its description says: put it again")
        return data

    async def _read_chunks(self, bucket: str, info: ObjectInfo, name: str, update: Callable[[bytes], object]) -> bytes:
        stream, subject = layout.stream_of(bucket), layout.chunk_subject(bucket, info.nuid)
        num_stored = await count_messages(self._requests, stream, subject)
        if num_stored != info.chunks:
            raise ObjectBrokenError(f"{name} has {num_stored} of its {info.chunks} chunks: put it again")
        parts: list[bytes] = []
        size = 0
        async with self._consume(stream, [subject], "all") as consumer:
            while len(parts) < info.chunks and size <= info.size:
                for message in await _next(consumer):
                    parts.append(message.payload)
                    update(message.payload)
                    size += len(message.payload)
        if size != info.size or len(parts) != info.chunks:
            raise ObjectBrokenError(f"{name} has {size} bytes where its description says {info.size}: put it again")
        return b"".join(parts)


def _described(bucket: str, message: BusMessage) -> ObjectInfo:
    """The description in a message. Raises ObjectBrokenError when it is none, or filed under another object's name."""
    info = layout.read_description(message.payload)
    try:
        is_its_own = layout.description_subject(bucket, info.name) == message.subject
    except ValueError:  # no object can have this name
        is_its_own = False
    if not is_its_own:
        raise ObjectBrokenError(f"the description on {message.subject} is of another object, {info.name[:64]!r}")
    return info


async def _next(consumer: Reader) -> list[BusMessage]:
    """The consumer's next batch. Raises BusError when nothing comes for `STALL_TIMEOUT_S`, or the bus is closed."""
    try:
        async with asyncio.timeout(STALL_TIMEOUT_S):
            return await anext(consumer)
    except TimeoutError:
        raise BusError(f"nothing more of the object came within {STALL_TIMEOUT_S:g} s") from None
    except StopAsyncIteration:
        raise ConnectionClosedError("the bus was closed before the object was read") from None
