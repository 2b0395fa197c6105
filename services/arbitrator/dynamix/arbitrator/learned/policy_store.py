"""Learned policies on the bus: each version of a policy is one message in the stream POLICIES, and never changes.

A version is one more than the newest one of its name. The broker refuses the second writer of a version, who takes the
next, and drops a name's oldest version for the newest. A file whose SHA-256 is not the expected one is refused.
`PolicyStore.choose` chooses a generation's policy at its start, and finds exactly that one after every restart.
"""

import asyncio
import datetime as dt
import hashlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from dynamix.arbitrator.policies.policy import NamedPolicy, Policy, digest_of
from dynamix.arbitrator.policies.registry import POLICIES as CODE
from dynamix.arbitrator.policies.registry import extension_policy, policy_names
from dynamix.runtime.bus import Bus, BusMessage, PermissionDeniedError, StaleWriterError, StreamMissingError
from dynamix.runtime.input_files import read_regular
from dynamix.schemas import subjects
from dynamix.schemas.codec import MAX_MESSAGE_BYTES, MalformedMessageError, decode
from dynamix.schemas.messages import Action, Job, PolicyVersion
from dynamix.schemas.policies import VERSION, VERSION_OPTION, check_options
from dynamix.schemas.streams import POLICIES

from .policy import LearnedPolicy
from .policy_file import SHIPPED_VERSION, PolicyFile, PolicyFileError, shipped_names, shipped_policy

logger = logging.getLogger(__name__)

MAX_POLICY_BYTES = MAX_MESSAGE_BYTES - 1024
NUM_HELD = 64
"""Learned policies kept in memory."""


class PolicyAbsentError(ValueError):
    """There is no such policy or version; or the server that answered does not know it yet, after a fail-over."""


class StoredPolicy(NamedTuple):
    """One version of a policy."""

    name: str
    version: int
    digest: bytes
    """SHA-256 of the file."""
    data: bytes
    stored_at: str = ""
    """RFC 3339; empty for one that does not come from the bus."""


def shipped_version(name: str) -> StoredPolicy | None:
    """The shipped policy of that name; `None` when there is none."""
    data = shipped_policy(name)
    return None if data is None else StoredPolicy(name, SHIPPED_VERSION, hashlib.sha256(data).digest(), data)


def read_policy_file(path: Path) -> PolicyFile:
    """Read and check a file that a person named.

    Raises:
        PolicyFileError: as `PolicyFile.from_bytes`, and when it cannot be read.
    """
    try:
        data = read_regular(path)
    except OSError as error:
        raise PolicyFileError(f"cannot read the policy file {path}: {error.strerror}") from error
    return PolicyFile.from_bytes(data, str(path))


class PolicyStore:
    """The policies on the bus, and those in memory of which they were made."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._held: dict[tuple[str, int | None, bytes | None], LearnedPolicy] = {}
        """By name, version and digest."""

    async def find(self, name: str, version: int | None = None) -> StoredPolicy | None:
        """A version of a policy, the newest by default; `None` when the bus has none.

        Raises:
            ValueError: when what is stored is not a policy.
        """
        try:
            message = await self._bus.last(POLICIES.name, subjects.of("policy", name))
        except StreamMissingError:
            logger.warning("the broker has no stream %s: run `dynamix provision`", POLICIES.name)
            return None
        found = None if message is None else _stored(message)
        if found is not None and version not in (None, found.version):
            older = [_stored(one) async for one in self._messages(name)]
            found = next((one for one in older if one.version == version), None)
        return found

    async def versions(self, name: str = subjects.ANY) -> list[StoredPolicy]:
        """All versions on the bus that can be read, of one policy or of all: by name, the newest first."""
        found = []
        try:
            async for message in self._messages(name):
                try:
                    found.append(_stored(message))
                except ValueError as error:
                    logger.warning("%s", error)
        except StreamMissingError:
            logger.warning("the broker has no stream %s: run `dynamix provision`", POLICIES.name)
        return sorted(found, key=lambda stored: (stored.name, -stored.version))

    async def _messages(self, name: str) -> AsyncIterator[BusMessage]:
        start = 1
        while message := await self._bus.first(POLICIES.name, subjects.of("policy", name), start=start):
            yield message
            start = message.sequence + 1

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
                await self._bus.publish_next(message, expected_last=0 if last is None else last.sequence)
            except StaleWriterError:  # another writer took this version
                continue
            return StoredPolicy(name, version, digest, data)

    async def choose(self, job: Job, recorded: Action | None) -> Policy:
        """The policy for a generation of a job.

        Without an action: the version that the job's option `version` asks for, else the newest on the bus, else the
        shipped one. With an action of this generation: exactly the policy that decided it.

        Raises:
            ValueError: when there is none that may decide, or it lacks an option of the job; the text says why.
        """
        version, digest = _wanted(job, recorded)
        policy: NamedPolicy | None = CODE.get(job.policy)
        if policy is None and job.policy not in shipped_names():  # not in the event loop: it imports a package
            policy = await asyncio.to_thread(extension_policy, job.policy)
        policy = policy or await self._learned(job.policy, version, digest)
        if version not in (None, policy.version):
            raise ValueError(f"policy {policy.name!r} has version {policy.version}, not {version}")
        if digest is not None and digest != (found := digest_of(policy)):
            raise ValueError(
                f"version {policy.version} of policy {policy.name!r} is not the file that decided this generation so "
                f"far: its SHA-256 begins with {found.hex()[:16] or 'nothing'}, not {digest.hex()[:16] or 'nothing'}; "
                "restart the job: a new generation takes what there is now"
            )
        check_options(policy.name, policy.options, job.policy_options)
        return policy

    async def _learned(self, name: str, version: int | None, digest: bytes | None) -> LearnedPolicy:
        if (held := self._held.get((name, version, digest))) is not None:
            return held
        try:
            stored = await self._find(name, version, digest)
        except PermissionDeniedError as error:
            raise ValueError(f"policy {name!r} cannot be read: {error}") from error
        key = (name, stored.version, stored.digest)
        if key not in self._held:
            file = PolicyFile.from_bytes(stored.data, f"version {stored.version} of policy {name!r}")
            self._held[key] = LearnedPolicy(file, name=name, version=stored.version)
        if len(self._held) > NUM_HELD:
            self._held.pop(next(iter(self._held)))
        return self._held[key]

    async def _find(self, name: str, version: int | None, digest: bytes | None) -> StoredPolicy:
        """Look for a version among the shipped files and on the bus."""
        shipped = shipped_version(name)
        if shipped is not None and version == SHIPPED_VERSION:
            return shipped
        if (stored := await self.find(name, version)) is not None:
            return stored
        if shipped is not None and version is None:
            return shipped
        versions = [str(stored.version) for stored in await self.versions(name)]
        versions += [] if shipped is None else [str(SHIPPED_VERSION)]
        if not versions:
            known = {*policy_names(), *shipped_names(), *(stored.name for stored in await self.versions())}
            raise PolicyAbsentError(f"no policy is called {name!r}: choose one of {', '.join(sorted(known))}")
        reason = "which decided this generation so far, is gone" if digest else "does not exist"
        raise PolicyAbsentError(f"version {version} of policy {name!r} {reason}: there is {', '.join(versions)}")


def _stored(message: BusMessage) -> StoredPolicy:
    try:
        found = decode(PolicyVersion, message.subject, message.payload)
    except MalformedMessageError as error:
        raise ValueError(f"{message.subject} at {message.sequence} cannot be read: {error}") from error
    if hashlib.sha256(found.content).digest() != found.digest:
        raise ValueError(f"{message.subject} at {message.sequence} is damaged: its SHA-256 is another")
    stored_at = dt.datetime.fromtimestamp(message.timestamp_ns / 1e9, dt.UTC).isoformat()
    return StoredPolicy(found.policy, found.version, found.digest, found.content, stored_at)


def _wanted(job: Job, recorded: Action | None) -> tuple[int | None, bytes | None]:
    """The version and the digest that a generation asks for; `None`: any."""
    if recorded is not None:
        if recorded.policy != job.policy:
            raise ValueError(
                f"policy {recorded.policy!r} decided this generation so far, its specification says {job.policy!r}: "
                "two runs made this generation; start one again while the broker answers, or under another id"
            )
        return recorded.policy_version, recorded.policy_digest
    version = job.policy_options.get(VERSION_OPTION)
    if version is None:
        return None, None
    if VERSION.fault(version):
        raise ValueError(f"option {VERSION_OPTION}={version} of policy {job.policy!r} must be a whole number from 1")
    return int(version), None
