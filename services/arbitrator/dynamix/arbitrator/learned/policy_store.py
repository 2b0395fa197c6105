"""Learned policies on the bus: files under a name and a version, each stored once and never changed.

A policy's version is the object `<policy>/<version>` in the bucket. The broker refuses a second writer of one version;
the refused one takes the next. A file whose digest is not the expected one is refused.
"""

import hashlib
import logging
import re
from pathlib import Path
from typing import NamedTuple, Protocol

from dynamix.arbitrator.policies.registry import policy_names
from dynamix.runtime.bus import (
    Bus,
    ObjectBrokenError,
    ObjectInfo,
    ObjectMissingError,
    StaleWriterError,
    StoredObject,
    StreamMissingError,
)
from dynamix.schemas.messages import PolicyVersion
from dynamix.schemas.networks.files import MAX_BYTES
from dynamix.schemas.streams import POLICIES
from dynamix.schemas.subjects import check_token

from .policy_file import SHIPPED_VERSION, SUFFIX, shipped_names

logger = logging.getLogger(__name__)

BUCKET = POLICIES.bucket
NUM_KEPT_VERSIONS = 200
"""The newest versions of each name are kept. A generation that outlives so many newer versions can no longer be
decided after a restart without a cache."""

_OBJECT = re.compile(r"([a-z0-9-]{1,63})/([1-9][0-9]{0,14})")
_NUMBER = re.compile(r"[0-9]{1,9}")
_FEATURE_VERSION = "feature_version"


class StoredPolicy(NamedTuple):
    """One version of a policy, as the bucket lists it."""

    name: str
    version: int
    digest: bytes
    """SHA-256 of the file; empty when the bucket's description of it is broken."""
    num_bytes: int
    feature_version: int
    """The version of the features that it was learned on; 0 when the bucket does not say."""
    stored_at: str
    """RFC 3339."""
    is_deleted: bool


class PolicyBucket(Protocol):
    """The part of the object stores that reading policies uses."""

    async def get(self, bucket: str, name: str, *, max_bytes: int = MAX_BYTES) -> StoredObject:
        """Read an object, its digest checked."""

    async def list_all(self, bucket: str) -> list[ObjectInfo]:
        """All objects, also deleted ones."""


class PolicyReader:
    """The policies in the bucket, with an optional directory that keeps what was read."""

    def __init__(self, bucket: PolicyBucket, cache: Path | None = None) -> None:
        self._bucket = bucket
        self._cache = cache

    async def get(self, name: str, version: int | None = None) -> tuple[StoredPolicy, bytes]:
        """A version of a policy, the newest by default.

        Raises:
            ObjectMissingError: when the bucket has none.
            BusError: when it cannot be read, or is not what its description says.
        """
        stored = await self.find(name, version)
        if stored is None:
            raise ObjectMissingError(f"the bus has no {_called(name, version)}")
        return stored, await self.read(stored)

    async def find(self, name: str, version: int | None = None) -> StoredPolicy | None:
        """What the bucket says of a version, the newest by default; `None` when it has none."""
        return next((stored for stored in await self.versions(name) if version in (None, stored.version)), None)

    async def read(self, stored: StoredPolicy) -> bytes:
        """The file of a listed version, from the cache when it is there. Raises as `get`."""
        data = self.cached(stored.digest)
        if data is None:
            found = await self._bucket.get(BUCKET, _object(stored.name, stored.version), max_bytes=MAX_BYTES)
            if found.info.sha256 != stored.digest:
                raise ObjectBrokenError(f"{_called(stored.name, stored.version)} was exchanged while it was read")
            data = found.data
            self._keep(stored.digest, data)
        return data

    async def versions(self, name: str | None = None) -> list[StoredPolicy]:
        """All versions on the bus, of one policy or of all: by name, the newest first."""
        return [stored for stored in await self._ever_stored(name) if not stored.is_deleted]

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

    async def _ever_stored(self, name: str | None) -> list[StoredPolicy]:
        """Every version ever stored; foreign objects of the bucket are left alone."""
        try:
            infos = await self._bucket.list_all(BUCKET)
        except StreamMissingError:
            logger.warning("the broker has no bucket %s: run `dynamix provision`", BUCKET)
            return []
        found = [stored for info in infos if (stored := _stored(info)) is not None and name in (None, stored.name)]
        return sorted(found, key=lambda stored: (stored.name, -stored.version))

    def _keep(self, digest: bytes, data: bytes) -> None:
        """Leave a copy in the cache; without room for it everything works, a little slower."""
        if self._cache is None:
            return
        path = self._cache / (digest.hex() + SUFFIX)
        partial = path.with_suffix(".partial")
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(data)
            partial.replace(path)
        except OSError as error:
            logger.warning("cannot keep a policy in the cache: %s", error)


class PolicyStore(PolicyReader):
    """The bucket of policies, for a program that may write it."""

    def __init__(self, bus: Bus, cache: Path | None = None) -> None:
        super().__init__(bus.objects, cache)
        self._bus = bus

    async def put(self, name: str, data: bytes, *, feature_version: int) -> StoredPolicy:
        """Store a file as the next version of a policy, and announce it.

        Putting the content of the newest version again stores nothing and only repeats the announcement, so that a
        caller that does not know whether it succeeded may simply try again.

        Raises:
            ValueError: when `name` cannot be a learned policy's, or the file is too large.
            BusError: when the bus cannot store it.
        """
        if check_token(name) in policy_names():
            raise ValueError(f"{name!r} is the name of a policy in code: give the learned one another name")
        if len(data) > MAX_BYTES:
            raise ValueError(f"a policy of {len(data)} bytes is over the limit of {MAX_BYTES}")
        stored = await self._put(name, data, feature_version)
        await self._bus.publish(
            PolicyVersion(
                policy=name,
                version=stored.version,
                feature_version=feature_version,
                digest=stored.digest,
                location=f"{POLICIES.name}/{name}/{stored.version}",
            )
        )
        return stored

    async def _put(self, name: str, data: bytes, feature_version: int) -> StoredPolicy:
        """What was stored as the next free version, or the newest one where it is the same."""
        digest, free = hashlib.sha256(data).digest(), 1 + (SHIPPED_VERSION if name in shipped_names() else 0)
        metadata = {_FEATURE_VERSION: str(feature_version)}
        while True:
            ever = await self._ever_stored(name)
            present = [stored for stored in ever if not stored.is_deleted]
            if present and present[0].digest == digest:
                return present[0]
            free = max([free, *(1 + stored.version for stored in ever)])
            await self._make_room(present)
            try:
                info = await self._bus.objects.put(
                    BUCKET, _object(name, free), data, metadata=metadata, create_only=True
                )
            except StaleWriterError:  # another writer was faster, or the listing leaves it out
                free += 1
                continue
            self._keep(digest, data)
            stored = _stored(info)
            assert stored is not None, "the name of the object is a policy's"
            return stored

    async def _make_room(self, before: list[StoredPolicy]) -> None:
        """First, so that a full bucket takes the new version; others may make room at the same time."""
        for old in before[NUM_KEPT_VERSIONS - 1 :]:
            try:
                await self._bus.objects.delete(BUCKET, _object(old.name, old.version))
            except (StaleWriterError, ObjectBrokenError) as error:
                logger.info("an old version was not removed: %s", error)


def _object(name: str, version: int) -> str:
    return f"{name}/{version}"


def _called(name: str, version: int | None) -> str:
    return f"policy {name!r}" if version is None else f"version {version} of policy {name!r}"


def _stored(info: ObjectInfo) -> StoredPolicy | None:
    """`None` for an object that is not a policy."""
    match = _OBJECT.fullmatch(info.name)
    if match is None:
        return None
    said = info.metadata.get(_FEATURE_VERSION, "")
    try:
        digest = info.sha256
    except ObjectBrokenError:  # reading it will say what is wrong; its number is taken all the same
        digest = b""
    return StoredPolicy(
        name=match[1],
        version=int(match[2]),
        digest=digest,
        num_bytes=info.size,
        feature_version=int(said) if _NUMBER.fullmatch(said) else 0,
        stored_at=info.mtime,
        is_deleted=info.deleted,
    )
