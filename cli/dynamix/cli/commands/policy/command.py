"""List, show, export and import learned policies: those that come with the package, and those on the bus.

A version is one file and never changes. A job takes the newest version when it starts (or its option `version`) and
keeps it until it is restarted. In a deployment `import` needs the broker's user `learner`; the rest, `watcher`.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from dynamix.arbitrator.learned.policy_file import SUFFIX, PolicyFile, PolicyFileError, PolicyMetadata
from dynamix.cli.connection import find
from dynamix.cli.errors import CommandError
from dynamix.cli.output import STANDARD_OUTPUT, add_json_argument, write_json
from dynamix.runtime.log import configure

from .render import details, table
from .shelf import Entry, Shelf, opened


class Outcome(NamedTuple):
    """What an action of the command has to say: to people, and to programs."""

    text: str
    result: object


class Reference(NamedTuple):
    """`NAME` or `NAME:VERSION` as typed."""

    name: str
    version: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="all versions that can be had", description="List all versions.")
    showing = actions.add_parser(
        "show", help="what one is, where it comes from, its scores", description="Show what is known of one version."
    )
    exporting = actions.add_parser(
        "export", help="write one to a file", description="Write one version to a file, as it is stored."
    )
    importing = actions.add_parser(
        "import", help="store a file as the next version", description="Store a file on the bus as the next version."
    )
    for one in (showing, exporting):
        one.add_argument("policy", metavar="NAME[:VERSION]", type=reference, help="default: its newest version")
    exporting.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="where to write it")
    importing.add_argument(
        "file", metavar="FILE", type=Path, help=f"a policy as `export` or `learn` wrote it ({SUFFIX})"
    )
    importing.add_argument("--name", metavar="NAME", help="what jobs choose it by (default: what the file says)")
    for one in (listing, showing, exporting, importing):
        add_json_argument(one)


def run(namespace: argparse.Namespace) -> int:
    """Do one action."""
    configure("critical")  # what goes wrong is said in a sentence
    outcome = asyncio.run(_act(namespace))
    if namespace.json is not None:
        write_json(outcome.result, namespace.json)
    if namespace.json != STANDARD_OUTPUT:
        print(outcome.text)
    return 0


def reference(text: str) -> Reference:
    """Read `NAME` or `NAME:VERSION`.

    Raises:
        argparse.ArgumentTypeError: when the version is no whole number from 1.
    """
    name, separator, version = text.partition(":")
    if not separator:
        return Reference(name, None)
    if not version.isdecimal() or int(version) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a version is a whole number from 1, as in ppo:3")
    return Reference(name, int(version))


async def _act(namespace: argparse.Namespace) -> Outcome:
    async with opened(find(os.environ)) as shelf:
        return await _ACTIONS[namespace.action](shelf, namespace)


async def _list(shelf: Shelf, _: argparse.Namespace) -> Outcome:
    entries = await shelf.entries()
    if shelf.absence:
        print(f"{shelf.absence}; these come with the package", file=sys.stderr)
    return Outcome(table(entries), {"broker": not shelf.absence, "policies": entries})


async def _show(shelf: Shelf, namespace: argparse.Namespace) -> Outcome:
    entry, data = await shelf.take(*namespace.policy)
    metadata, fault = _read(data)
    result = {"policy": entry, "usable": not fault, "reason": fault, "metadata": metadata}
    return Outcome(details(entry, metadata, fault), result)


async def _export(shelf: Shelf, namespace: argparse.Namespace) -> Outcome:
    entry, data = await shelf.take(*namespace.policy)
    try:
        await asyncio.to_thread(namespace.output.write_bytes, data)
    except OSError as error:
        raise CommandError(f"cannot write {namespace.output}: {error.strerror}") from error
    return _done(entry, f"written to {namespace.output}", {"file": str(namespace.output)})


async def _import(shelf: Shelf, namespace: argparse.Namespace) -> Outcome:
    try:
        data = await asyncio.to_thread(namespace.file.read_bytes)
        metadata = PolicyFile.from_bytes(data, str(namespace.file)).metadata
    except OSError as error:
        raise CommandError(f"cannot read {namespace.file}: {error.strerror}") from error
    except PolicyFileError as error:
        raise CommandError(str(error)) from error
    name = namespace.name or metadata.policy
    stored = await shelf.store.put(name, data, feature_version=metadata.feature_version)
    entry, _ = await shelf.take(stored.name, stored.version)
    return _done(entry, "stored on the bus: jobs of this policy that start from now on take it", {})


def _done(entry: Entry, what: str, more: Mapping[str, str]) -> Outcome:
    size = f"{entry.num_bytes:,} bytes, sha256 {entry.sha256[:12]}"
    return Outcome(f"{entry.name} version {entry.version} ({size}) {what}", {"policy": entry, **more})


def _read(data: bytes) -> tuple[PolicyMetadata | None, str]:
    """The metadata, and why this program cannot use the file."""
    try:
        return PolicyFile.from_bytes(data, "the file").metadata, ""
    except PolicyFileError as error:
        return None, str(error)


_ACTIONS: Mapping[str, Callable[[Shelf, argparse.Namespace], Awaitable[Outcome]]] = {
    "list": _list,
    "show": _show,
    "export": _export,
    "import": _import,
}
