"""Learned policies on the bus: each version of a policy is one message in the stream POLICIES, and never changes.

A version is one more than the newest one of its name. The broker refuses the second writer of a version, who takes the
next, and drops a name's oldest version for the newest. A file whose SHA-256 is not the expected one is refused.
"""

import datetime as dt
import hashlib
import logging
from pathlib import Path
from typing import NamedTuple

from dynamix.arbitrator.policies.registry import policy_names
from dynamix.runtime.bus import Bus, BusMessage, StaleWriterError, StreamMissingError
from dynamix.schemas import subjects
from dynamix.schemas.codec import MAX_MESSAGE_BYTES, MalformedMessageError, decode
from dynamix.schemas.messages import PolicyVersion
from dynamix.schemas.streams import POLICIES

from .policy_file import SHIPPED_VERSION, SUFFIX, shipped_names

logger = logging.getLogger(__name__)

MAX_POLICY_BYTES = MAX_MESSAGE_BYTES - 1024


class PolicyMissingError(ValueError):
    """The bus has no such policy or version."""


class StoredPolicy(NamedTuple):
    """One version of a policy."""

    name: str
    version: int
    digest: bytes
    """SHA-256 of the file."""
    data: bytes
    stored_at: str
    """RFC 3339; empty in what `put` returns."""


class PolicyReader:
    """The policies on the bus, with an optional directory that keeps what was read."""

    def __init__(self, bus: Bus, cache: Path | None = None) -> None:
        self._reading = bus
        self._cache = cache

    async def find(self, name: str, version: int | None = None) -> StoredPolicy | None:
        """A version of a policy, the newest by default; `None` when the bus has none.

        Raises:
            ValueError: when what is stored is not a policy.
        """
        subject = subjects.of("policy", name)
        try:
            message = await self._reading.last(POLICIES.name, subject)
        except StreamMissingError:
            logger.warning("the broker has no stream %s: run `dynamix provision`", POLICIES.name)
            return None
        stored = None if message is None else _stored(message)
        if message is None or stored is None or version in (None, stored.version):
            return self._kept(stored)
        low, high = 1, message.sequence
        while low < high:  # later versions have higher sequences
            middle = (low + high) // 2
            message = await self._reading.first(POLICIES.name, subject, start=middle)
            stored = None if message is None else _stored(message)
            if message is not None and stored is not None and stored.version < version:
                low = message.sequence + 1
            else:
                high = middle
        message = await self._reading.first(POLICIES.name, subject, start=low)
        stored = None if message is None else _stored(message)
        return self._kept(stored) if stored is not None and stored.version == version else None

    async def get(self, name: str, version: int | None = None) -> StoredPolicy:
        """The version; raises PolicyMissingError where `find` returns `None`."""
        stored = await self.find(name, version)
        if stored is None:
            raise PolicyMissingError(f"the bus has no {name if version is None else f'version {version} of {name}'}")
        return stored

    async def versions(self, name: str = subjects.ANY) -> list[StoredPolicy]:
        """All versions on the bus, of one policy or of all: by name, the newest first."""
        found, start = [], 1
        try:
            while message := await self._reading.first(POLICIES.name, subjects.of("policy", name), start=start):
                start = message.sequence + 1
                try:
                    found.append(_stored(message))
                except ValueError as error:
                    logger.warning("%s", error)
        except StreamMissingError:
            logger.warning("the broker has no stream %s: run `dynamix provision`", POLICIES.name)
        return sorted(found, key=lambda stored: (stored.name, -stored.version))

    def cached(self, digest: bytes) -> bytes | None:
        """A file of this digest, from the cache; `None` when it has none."""
        if self._cache is None or not digest:
            return None
        try:
            data = (self._cache / (digest.hex() + SUFFIX)).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("cannot read the cache of policies: %s", error)
            return None
        return data if hashlib.sha256(data).digest() == digest else None

    def _kept(self, stored: StoredPolicy | None) -> StoredPolicy | None:
        """Leave a copy in the cache; a cache that cannot be written costs only what it would have saved."""
        if self._cache is None or stored is None or self.cached(stored.digest) is not None:
            return stored
        path = self._cache / (stored.digest.hex() + SUFFIX)
        partial = path.with_suffix(".partial")
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(stored.data)
            partial.replace(path)
        except OSError as error:
            logger.warning("cannot keep a policy in the cache: %s", error)
        return stored


class PolicyStore(PolicyReader):
    """The policies on the bus, for a program that may add some."""

    def __init__(self, bus: Bus, cache: Path | None = None) -> None:
        super().__init__(bus, cache)
        self._bus = bus

    async def put(self, name: str, data: bytes) -> StoredPolicy:
        """Store a file as the next version of a policy; content equal to the newest version stores nothing.

        Raises:
            ValueError: when `name` cannot be a learned policy's, or the file is too large.
            BusError: when the bus cannot store it.
        """
        if subjects.check_token(name) in policy_names():
            raise ValueError(f"{name!r} is the name of a policy in code: give the learned one another name")
        if len(data) > MAX_POLICY_BYTES:
            raise ValueError(f"a policy of {len(data)} bytes is over the limit of {MAX_POLICY_BYTES}")
        digest = hashlib.sha256(data).digest()
        while True:
            last = await self._bus.last(POLICIES.name, subjects.of("policy", name))
            newest = None if last is None else _stored(last)
            if newest is not None and newest.digest == digest:
                return newest
            free = 1 + (SHIPPED_VERSION if name in shipped_names() else 0)
            version = free if newest is None else newest.version + 1
            message = PolicyVersion(policy=name, version=version, digest=digest, content=data)
            try:
                await self._bus.publish_policy(message, expected_last=0 if last is None else last.sequence)
            except StaleWriterError:  # another writer took this version
                continue
            return StoredPolicy(name, version, digest, data, "")


def _stored(message: BusMessage) -> StoredPolicy:
    try:
        found = decode(PolicyVersion, message.subject, message.payload)
    except MalformedMessageError as error:
        raise ValueError(f"{message.subject} at {message.sequence} cannot be read: {error}") from error
    if hashlib.sha256(found.content).digest() != found.digest:
        raise ValueError(f"{message.subject} at {message.sequence} is damaged: its SHA-256 is another")
    return StoredPolicy(found.policy, found.version, found.digest, found.content, _when(message.timestamp_ns))


def _when(time_ns: int) -> str:
    return dt.datetime.fromtimestamp(time_ns / 1e9, dt.UTC).isoformat()
