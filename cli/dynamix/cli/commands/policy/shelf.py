"""Where learned policies are found: in the package, and on the bus when there is one."""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator
from typing import Literal

import msgspec

from dynamix.arbitrator.learned.policy_file import PolicyFile, PolicyFileError
from dynamix.arbitrator.learned.policy_store import PolicyStore, StoredPolicy
from dynamix.arbitrator.learned.shipped import SHIPPED_VERSION, shipped_names, shipped_policy
from dynamix.cli.errors import CommandError
from dynamix.runtime.bus import Bus, BusError, PermissionDeniedError, StreamMissingError
from dynamix.runtime.settings import BusSettings, redact_url
from dynamix.schemas.streams import POLICIES

CONNECT_TIMEOUT_S = 5.0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a learned policy that can be had."""

    name: str
    version: int
    origin: Literal["bus", "shipped"]
    num_bytes: int
    feature_version: int
    """0 when it is not known."""
    sha256: str
    stored_at: str = ""
    """RFC 3339; empty for what came with the package."""


class Shelf:
    """The policies that can be had, and how to get at them.

    Attributes:
        absence: why there is no bus, as a sentence; empty when there is one.
    """

    def __init__(self, store: PolicyStore | None, absence: str = "") -> None:
        self._store = store
        self.absence = absence

    @property
    def store(self) -> PolicyStore:
        """The bus's part.

        Raises:
            CommandError: when there is no bus.
        """
        if self._store is None:
            raise CommandError(self.absence)
        return self._store

    async def entries(self) -> list[Entry]:
        """All versions: by name, the newest first."""
        stored = [] if self._store is None else await self._store.versions()
        found = [_of_bus(one) for one in stored] + [_of_package(name) for name in shipped_names()]
        return sorted(found, key=lambda entry: (entry.name, -entry.version))

    async def take(self, name: str, version: int | None) -> tuple[Entry, bytes]:
        """A version of a policy and its file, the newest by default.

        Raises:
            CommandError: when there is none; the text says which there are.
        """
        entries = await self.entries()
        entry = next((one for one in entries if one.name == name and version in (None, one.version)), None)
        if entry is None:
            raise CommandError(self._absence_of(name, version, entries))
        data = shipped_policy(name) if entry.origin == "shipped" else await self._read(entry)
        assert data is not None, "a listed file was there a moment ago"
        return entry, data

    async def _read(self, entry: Entry) -> bytes:
        return (await self.store.get(entry.name, entry.version))[1]

    def _absence_of(self, name: str, version: int | None, entries: list[Entry]) -> str:
        versions = [str(entry.version) for entry in entries if entry.name == name]
        if versions:
            text = f"policy {name!r} has no version {version}: there is {', '.join(versions)}"
        else:
            names = sorted({entry.name for entry in entries})
            text = f"no learned policy is called {name!r}: there is {', '.join(names) or 'none'}"
        return f"{text} ({self.absence})" if self.absence else text


@contextlib.asynccontextmanager
async def opened(settings: BusSettings) -> AsyncIterator[Shelf]:
    """The shelf; without a broker, or before it is provisioned, it holds what came with the package.

    Raises:
        CommandError: when the broker refuses us, or what is asked of it.
    """
    where = redact_url(settings.url)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            bus = await Bus.connect(settings, name=f"policy-{os.getpid()}", wait=False)
    except (PermissionDeniedError, ValueError) as error:
        raise CommandError(str(error)) from error
    except (BusError, OSError, TimeoutError):
        yield Shelf(None, f"no broker at {where}: start one with `dynamix up`, or set DYNAMIX_NATS_URL")
        return
    try:
        yield await _of_broker(bus, where)
    except (BusError, ValueError) as error:
        raise CommandError(str(error)) from error
    finally:
        await bus.close()


async def _of_broker(bus: Bus, where: str) -> Shelf:
    try:
        await bus.stream_state(POLICIES.name)
    except StreamMissingError:
        return Shelf(None, f"the broker at {where} has no bucket for policies: run `dynamix provision`")
    return Shelf(PolicyStore(bus))


def _of_bus(stored: StoredPolicy) -> Entry:
    return Entry(
        name=stored.name,
        version=stored.version,
        origin="bus",
        num_bytes=stored.num_bytes,
        feature_version=stored.feature_version,
        sha256=stored.digest.hex(),
        stored_at=stored.stored_at,
    )


def _of_package(name: str) -> Entry:
    data = shipped_policy(name)
    assert data is not None, "a listed file was there a moment ago"
    try:
        feature_version = PolicyFile.from_bytes(data).metadata.feature_version
    except PolicyFileError:  # `show` says what is wrong with it
        feature_version = 0
    return Entry(
        name=name,
        version=SHIPPED_VERSION,
        origin="shipped",
        num_bytes=len(data),
        feature_version=feature_version,
        sha256=hashlib.sha256(data).hexdigest(),
    )
