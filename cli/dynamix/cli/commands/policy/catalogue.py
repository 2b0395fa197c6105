"""The learned policies that jobs can use, in the package and on the bus when there is one; and the same as text."""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from dynamix.arbitrator.learned.policy_file import (
    SHIPPED_VERSION,
    PolicyFile,
    PolicyFileError,
    PolicyMetadata,
    shipped_names,
    shipped_policy,
)
from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.cli.connection import HOW_TO_START, NoBrokerError, connected
from dynamix.cli.errors import CommandError, explained
from dynamix.cli.output import in_columns
from dynamix.runtime.bus import Bus, StreamMissingError
from dynamix.runtime.settings import BusSettings, redact_url
from dynamix.schemas.streams import POLICIES

CONNECT_TIMEOUT_S = 5.0
HEADINGS = ("policy", "version", "from", "size", "features", "stored", "sha256")
NUM_DIGEST_CHARACTERS = 12
NAME_WIDTH = 20
LONG_LISTS = ("rank_features", "global_features", "inputs")
"""Left out here; `--json` has them."""


class AvailablePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a learned policy."""

    name: str
    version: int
    origin: Literal["bus", "shipped"]
    num_bytes: int
    feature_version: int
    """0 when it is not known."""
    sha256: str
    stored_at: str = ""
    """RFC 3339; empty for a policy of the package."""


class PolicyCatalogue(NamedTuple):
    """Lists and reads learned policies."""

    store: PolicyStore | None
    """The policies on the bus."""
    absence: str = ""
    """Why there is no bus, in a sentence; empty when there is one."""

    def on_bus(self) -> PolicyStore:
        """The policies on the bus; raises CommandError when there is no bus."""
        if self.store is None:
            raise CommandError(self.absence)
        return self.store

    async def entries(self) -> list[AvailablePolicy]:
        """All versions: by name, the newest first."""
        stored = [] if self.store is None else await self.store.versions()
        found = [_available(one.name, one.version, "bus", one.data, one.stored_at) for one in stored]
        found += [_available(name, SHIPPED_VERSION, "shipped", shipped_policy(name) or b"") for name in shipped_names()]
        return sorted(found, key=lambda entry: (entry.name, -entry.version))

    async def read(self, name: str, version: int | None) -> tuple[AvailablePolicy, bytes]:
        """A version of a policy and the bytes of its file, the newest by default. Raises CommandError without one."""
        entries = await self.entries()
        entry = next((one for one in entries if one.name == name and version in (None, one.version)), None)
        if entry is None:
            raise CommandError(self._absence_of(name, version, entries))
        if entry.origin == "bus":
            return entry, (await self.on_bus().get(entry.name, entry.version)).data
        data = shipped_policy(name)
        assert data is not None, "a listed file is there"
        return entry, data

    def _absence_of(self, name: str, version: int | None, entries: list[AvailablePolicy]) -> str:
        versions = [str(entry.version) for entry in entries if entry.name == name]
        if versions:
            text = f"policy {name!r} has no version {version}: there is {', '.join(versions)}"
        else:
            names = sorted({entry.name for entry in entries})
            text = f"no learned policy is called {name!r}: there is {', '.join(names) or 'none'}"
        return f"{text} ({self.absence})" if self.absence else text


@contextlib.asynccontextmanager
async def opened(settings: BusSettings) -> AsyncIterator[PolicyCatalogue]:
    """The catalogue; without a broker, or before it is provisioned, of the shipped policies only."""
    try:
        async with connected(settings, "policy", timeout_s=CONNECT_TIMEOUT_S, wait=False) as bus:
            with explained(ValueError):
                yield await _of_broker(bus, redact_url(settings.url))
    except NoBrokerError:
        yield PolicyCatalogue(None, f"no broker at {redact_url(settings.url)}: {HOW_TO_START}")


async def _of_broker(bus: Bus, where: str) -> PolicyCatalogue:
    try:
        await bus.stream_state(POLICIES.name)
    except StreamMissingError:
        return PolicyCatalogue(None, f"the broker at {where} has no stream for policies: run `dynamix provision`")
    return PolicyCatalogue(PolicyStore(bus))


def _available(
    name: str, version: int, origin: Literal["bus", "shipped"], data: bytes, stored_at: str = ""
) -> AvailablePolicy:
    try:
        feature_version = PolicyFile.from_bytes(data).metadata.feature_version
    except PolicyFileError:  # `show` says what is wrong with it
        feature_version = 0
    return AvailablePolicy(
        name=name,
        version=version,
        origin=origin,
        num_bytes=len(data),
        feature_version=feature_version,
        sha256=hashlib.sha256(data).hexdigest(),
        stored_at=stored_at,
    )


def table(entries: Sequence[AvailablePolicy]) -> str:
    """One line per version."""
    if not entries:
        return "no learned policies: `dynamix learn` makes one, `dynamix policy import FILE` stores one"
    return in_columns([HEADINGS, *map(_row, entries)])


def details(entry: AvailablePolicy, metadata: PolicyMetadata | None, fault: str) -> str:
    """One version, a property per line."""
    place = "comes with the package" if entry.origin == "shipped" else f"on the bus since {_when(entry.stored_at)}"
    lines = [
        f"{entry.name} version {entry.version}, {place}",
        _line("size", f"{entry.num_bytes:,} bytes"),
        _line("sha256", entry.sha256),
        _line("usable here", f"no: {fault}" if fault else "yes"),
    ]
    if metadata is not None:
        shown = [name for name in metadata.__struct_fields__ if name not in LONG_LISTS]
        lines += [_line(name.replace("_", " "), _text(getattr(metadata, name))) for name in shown]
    return "\n".join(lines)


def _row(entry: AvailablePolicy) -> tuple[str, ...]:
    return (
        entry.name,
        str(entry.version),
        "the package" if entry.origin == "shipped" else "the bus",
        f"{entry.num_bytes / 1024:.0f} KB",
        str(entry.feature_version or "?"),
        _when(entry.stored_at) or "-",
        entry.sha256[:NUM_DIGEST_CHARACTERS],
    )


def _when(time: str) -> str:
    """A time cut to the second: `2026-11-20 17:22:03`."""
    return time[:19].replace("T", " ")


def _line(name: str, value: str) -> str:
    return f"  {name:{NAME_WIDTH}}{value}"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items()) or "-"
    if isinstance(value, (tuple, list)):
        return ", ".join(_text(item) for item in value) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value) or "-"
