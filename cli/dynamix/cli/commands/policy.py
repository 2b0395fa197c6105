"""List, show, export and import learned policies of the package and on the bus.

A version is one file and never changes. A job takes the newest version when it starts (or its option `version`) and
keeps it until it is restarted. In a deployment `import` needs the key of `learner`; the other actions `watcher`.
"""

import argparse
import contextlib
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from dynamix.arbitrator.learned.policy import action_set_of
from dynamix.arbitrator.learned.policy_file import (
    SHIPPED_VERSION,
    SUFFIX,
    PolicyFile,
    PolicyFileError,
    PolicyMetadata,
    shipped_names,
    shipped_policy,
)
from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.cli.actions import ActionResult, adding_actions, run_action
from dynamix.cli.arguments import add_json_argument, add_output_argument
from dynamix.cli.connection import HOW_TO_START, NoBrokerError, connected, find
from dynamix.cli.errors import CommandError, explained, reading
from dynamix.cli.output import POLICY, write_file
from dynamix.cli.terminal import in_columns
from dynamix.runtime.bus import StreamMissingError
from dynamix.runtime.input_files import read_regular
from dynamix.runtime.settings import redact_url
from dynamix.schemas.streams import POLICIES

CONNECT_TIMEOUT_S = 20.0
HEADINGS = ("policy", "version", "from", "size", "stored", "sha256")
LONG_LISTS = ("inputs",)
"""Left out here; `--json` has them."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's actions."""
    add = adding_actions(parser)
    listing = add("list", _list, "all available versions", "List all versions of all policies.")
    what = "show origin, scores and format of one version"
    showing = add("show", _show, what, "Show origin, scores and format of one version.")
    exporting = add("export", _export, "write one to a file", "Write one version to a file, as it is stored.")
    what = "store a file as the next version"
    importing = add("import", _import, what, "Store a file on the bus as the next version.")
    for one in (showing, exporting):
        one.add_argument(
            "policy", metavar="NAME[:VERSION]", type=reference, help="a policy (default: its newest version)"
        )
    add_output_argument(exporting, POLICY, "where to write it", required=True)
    what = f"a policy as `export` or `learn` wrote it ({SUFFIX})"
    importing.add_argument("file", metavar="FILE", type=Path, help=what)
    importing.add_argument("--name", metavar="NAME", help="its name in jobs (default: the name in the file)")
    for one in (listing, showing, exporting, importing):
        add_json_argument(one)


def run(arguments: argparse.Namespace) -> int:
    """Do one action."""
    return run_action(_act(arguments), arguments)


def reference(text: str) -> tuple[str, int | None]:
    """An argument's type: `NAME` or `NAME:VERSION`, with an integer from 1."""
    name, separator, version = text.partition(":")
    if not separator:
        return name, None
    if not version.isdecimal() or int(version) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a version is an integer from 1, as in ppo:3")
    return name, int(version)


class AvailablePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a learned policy."""

    name: str
    version: int
    origin: Literal["bus", "shipped"]
    num_bytes: int
    sha256: str
    stored_at: str = ""
    """RFC 3339; empty for a policy of the package."""


class PolicyCatalogue(NamedTuple):
    """Lists and reads learned policies."""

    store: PolicyStore | None
    """The policies on the bus."""
    absence: str = ""
    """Reason why there is no bus, in a sentence; empty when there is one."""

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
        for entry in entries:
            if entry.name == name and version in (None, entry.version):
                shipped = shipped_policy(name) or b""
                is_shipped = entry.origin == "shipped"
                return entry, shipped if is_shipped else (await self.on_bus().get(name, entry.version)).data
        if versions := [str(entry.version) for entry in entries if entry.name == name]:
            text = f"policy {name!r} has no version {version}: there is {', '.join(versions)}"
        else:
            names = sorted({entry.name for entry in entries})
            text = f"no learned policy is called {name!r}: there is {', '.join(names) or 'none'}"
        raise CommandError(f"{text} ({self.absence})" if self.absence else text)


def _available(
    name: str, version: int, origin: Literal["bus", "shipped"], data: bytes, stored_at: str = ""
) -> AvailablePolicy:
    return AvailablePolicy(
        name=name,
        version=version,
        origin=origin,
        num_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        stored_at=stored_at,
    )


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[PolicyCatalogue]:
    """The catalogue; without a broker, or before it is provisioned, of the shipped policies only."""
    settings = find(os.environ)
    where = redact_url(settings.url)
    try:
        async with connected(settings, "policy", timeout_s=CONNECT_TIMEOUT_S, wait=False) as bus:
            with explained(ValueError):
                try:
                    await bus.stream_state(POLICIES.name)
                    catalogue = PolicyCatalogue(PolicyStore(bus))
                except StreamMissingError:
                    absence = f"the broker at {where} has no stream for policies: run `dynamix provision`"
                    catalogue = PolicyCatalogue(None, absence)
                yield catalogue
    except NoBrokerError:
        yield PolicyCatalogue(None, f"no broker at {where}: {HOW_TO_START}")


async def _act(arguments: argparse.Namespace) -> ActionResult:
    async with opened() as catalogue:
        result: ActionResult = await arguments.act(catalogue, arguments)
        return result


async def _list(catalogue: PolicyCatalogue, _: argparse.Namespace) -> ActionResult:
    entries = await catalogue.entries()
    if catalogue.absence:
        print(f"{catalogue.absence}; these come with the package", file=sys.stderr)
    return table(entries), {"broker": not catalogue.absence, "policies": entries}


async def _show(catalogue: PolicyCatalogue, arguments: argparse.Namespace) -> ActionResult:
    entry, data = await catalogue.read(*arguments.policy)
    metadata, fault = _read(data)
    result = {"policy": entry, "usable": not fault, "reason": fault, "metadata": metadata}
    return details(entry, metadata, fault), result


async def _export(catalogue: PolicyCatalogue, arguments: argparse.Namespace) -> ActionResult:
    entry, data = await catalogue.read(*arguments.policy)
    write_file(arguments.output, data)
    return _done(entry, f"written to {arguments.output}", {"file": str(arguments.output)})


async def _import(catalogue: PolicyCatalogue, arguments: argparse.Namespace) -> ActionResult:
    with reading(arguments.file), explained(PolicyFileError):
        data = read_regular(arguments.file)
        metadata = PolicyFile.from_bytes(data, str(arguments.file)).metadata
        action_set_of(metadata)
    name = arguments.name or metadata.policy
    stored = await catalogue.on_bus().put(name, data)
    entry, _ = await catalogue.read(stored.name, stored.version)
    return _done(entry, "stored on the bus: jobs of this policy that start from now on take it", {})


def _done(entry: AvailablePolicy, what: str, more: Mapping[str, str]) -> ActionResult:
    size = f"{entry.num_bytes:,} bytes, sha256 {entry.sha256[:12]}"
    return f"{entry.name} version {entry.version} ({size}) {what}", {"policy": entry, **more}


def _read(data: bytes) -> tuple[PolicyMetadata | None, str]:
    """The metadata, and why this program cannot use the file."""
    try:
        metadata = PolicyFile.from_bytes(data, "the file").metadata
        action_set_of(metadata)
    except PolicyFileError as error:
        return None, str(error)
    return metadata, ""


def table(entries: Sequence[AvailablePolicy]) -> str:
    """One line per version."""
    if not entries:
        return "no learned policies: `dynamix learn` makes one, `dynamix policy import FILE` stores one"
    rows = [
        (
            entry.name,
            str(entry.version),
            "the package" if entry.origin == "shipped" else "the bus",
            f"{entry.num_bytes / 1024:.0f} KB",
            _when(entry.stored_at) or "-",
            entry.sha256[:12],
        )
        for entry in entries
    ]
    return in_columns(HEADINGS, rows, left=HEADINGS)


def details(entry: AvailablePolicy, metadata: PolicyMetadata | None, fault: str) -> str:
    """One version, a property per line."""
    place = "comes with the package" if entry.origin == "shipped" else f"on the bus since {_when(entry.stored_at)}"
    properties = [
        ("size", f"{entry.num_bytes:,} bytes"),
        ("sha256", entry.sha256),
        ("usable here", f"no: {fault}" if fault else "yes"),
    ]
    if metadata is not None:
        shown = [name for name in metadata.__struct_fields__ if name not in LONG_LISTS]
        properties += [(name.replace("_", " "), _text(getattr(metadata, name))) for name in shown]
    lines = (f"  {name:20}{value}" for name, value in properties)
    return "\n".join([f"{entry.name} version {entry.version}, {place}", *lines])


def _when(time: str) -> str:
    """A time cut to the second: `2026-11-20 17:22:03`."""
    return time[:19].replace("T", " ")


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items()) or "-"
    if isinstance(value, (tuple, list)):
        return ", ".join(_text(item) for item in value) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value) or "-"
