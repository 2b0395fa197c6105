"""Chooses the policy of a generation at its start, and finds exactly that one again after every restart."""

import asyncio
import logging
from typing import NamedTuple

from dynamix.arbitrator.policies.policy import NamedPolicy, Policy, digest_of
from dynamix.arbitrator.policies.registry import POLICIES, extension_policy, policy_names
from dynamix.runtime.bus import PermissionDeniedError
from dynamix.schemas.messages import Action, Job
from dynamix.schemas.policies import VERSION, VERSION_OPTION, check_options

from .policy import LearnedPolicy
from .policy_file import SHIPPED_VERSION, PolicyFile, shipped_names, shipped_policy
from .policy_store import PolicyReader, StoredPolicy

logger = logging.getLogger(__name__)

NUM_HELD = 64
"""Learned policies kept in memory."""


class _Wanted(NamedTuple):
    """The version and digest that a generation asks for; `None`: any."""

    version: int | None
    digest: bytes | None


class PolicyAbsentError(ValueError):
    """There is no such policy or version; or the server that answered does not know it yet, after a fail-over."""


class PolicySource:
    """Chooses among policies in code, files of the package and files on the bus."""

    def __init__(self, store: PolicyReader) -> None:
        self._store = store
        self._held: dict[tuple[str, int, bytes], LearnedPolicy] = {}

    async def choose(self, job: Job, recorded: Action | None) -> Policy:
        """The policy for a generation of a job.

        Without an action: the version that the job's option `version` asks for, else the newest on the bus, else the
        shipped one. With an action of this generation: exactly the policy that decided it.

        Raises:
            ValueError: when there is none that may decide, or it lacks an option of the job; the text says why.
        """
        wanted = _wanted(job, recorded)
        policy = POLICIES.get(job.policy)
        if (
            policy is None and job.policy not in shipped_names()
        ):  # another package is imported apart from the event loop
            policy = await asyncio.to_thread(extension_policy, job.policy)
        policy = policy or await self._learned(job.policy, wanted)
        _check_identity(policy, wanted)
        check_options(policy.name, policy.options, job.policy_options)
        return policy

    async def _learned(self, name: str, wanted: _Wanted) -> NamedPolicy:
        held = self._held.get((name, wanted.version or 0, wanted.digest or b""))
        if held is not None:
            return held
        try:
            policy = await self._read(name, wanted)
        except PermissionDeniedError as error:
            raise ValueError(f"policy {name!r} cannot be read: {error}") from error
        self._held[name, policy.version, policy.digest] = policy
        while len(self._held) > NUM_HELD:
            self._held.pop(next(iter(self._held)))
        return policy

    async def _read(self, name: str, wanted: _Wanted) -> LearnedPolicy:
        """The bus first: its learners began with the shipped file. A cached file serves when the bus has lost it."""
        is_shipped = wanted.version == SHIPPED_VERSION and name in shipped_names()
        if not is_shipped and (stored := await self._find(name, wanted)) is not None:
            held = self._held.get((name, stored.version, stored.digest))
            return held or _loaded(name, stored.version, stored.data)
        if wanted.version is not None and wanted.digest and (data := self._store.cached(wanted.digest)) is not None:
            return _loaded(name, wanted.version, data)
        shipped = shipped_policy(name) if wanted.version in (None, SHIPPED_VERSION) else None
        if shipped is not None:
            return _loaded(name, SHIPPED_VERSION, shipped)
        raise PolicyAbsentError(await self._absence(name, wanted))

    async def _find(self, name: str, wanted: _Wanted) -> StoredPolicy | None:
        try:
            stored = await self._store.find(name, wanted.version)
        except ValueError as error:
            if self._store.cached(wanted.digest or b"") is not None:
                return None
            raise ValueError(f"policy {name!r} cannot be read: {error}") from error
        if stored is not None and wanted.digest and stored.digest != wanted.digest:
            cached = self._store.cached(wanted.digest)
            return stored if cached is None else None  # refused by its digest, unless the true one is at hand
        return stored

    async def _absence(self, name: str, wanted: _Wanted) -> str:
        versions = [str(stored.version) for stored in await self._store.versions(name)]
        versions += [str(SHIPPED_VERSION)] if name in shipped_names() else []
        if not versions:
            known = {*policy_names(), *shipped_names(), *(stored.name for stored in await self._store.versions())}
            return f"no policy is called {name!r}: choose one of {', '.join(sorted(known))}"
        reason = "which decided this generation so far, is gone" if wanted.digest else "does not exist"
        return f"version {wanted.version} of policy {name!r} {reason}: there is {', '.join(versions)}"


def _loaded(name: str, version: int, data: bytes) -> LearnedPolicy:
    """The policy in a file, under the name and version that it is stored by; raises PolicyFileError."""
    file = PolicyFile.from_bytes(data, f"version {version} of policy {name!r}")
    return LearnedPolicy(file, name=name, version=version)


def _wanted(job: Job, recorded: Action | None) -> _Wanted:
    if recorded is not None:
        if recorded.policy != job.policy:
            raise ValueError(
                f"policy {recorded.policy!r} decided this generation so far, its specification says {job.policy!r}: "
                "two runs made this generation; start one again while the broker answers, or under another id"
            )
        return _Wanted(recorded.policy_version, recorded.policy_digest)
    version = job.policy_options.get(VERSION_OPTION)
    if version is None:
        return _Wanted(None, None)
    if VERSION.fault(version):
        raise ValueError(f"option {VERSION_OPTION}={version:g} of policy {job.policy!r} must be a whole number from 1")
    return _Wanted(int(version), None)


def _check_identity(policy: Policy, wanted: _Wanted) -> None:
    if wanted.version not in (None, policy.version):
        raise ValueError(f"policy {policy.name!r} has version {policy.version}, not {wanted.version}")
    found = digest_of(policy)
    if wanted.digest is not None and wanted.digest != found:
        raise ValueError(
            f"version {policy.version} of policy {policy.name!r} is not the file that decided this generation so far: "
            f"its SHA-256 begins with {found.hex()[:16] or 'nothing'}, not {wanted.digest.hex()[:16] or 'nothing'}; "
            "restart the job: a new generation takes what there is now"
        )
