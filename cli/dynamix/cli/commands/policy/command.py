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
from dynamix.cli.output import POLICY, add_json_argument, add_output_argument, write_result, writing
from dynamix.runtime import output_files
from dynamix.runtime.log import configure as configure_log

from .catalogue import AvailablePolicy, PolicyCatalogue, opened
from .view import details, table


class ActionResult(NamedTuple):
    """The result of an action: text for people, data for `--json`."""

    text: str
    result: object


class PolicyReference(NamedTuple):
    """`NAME` or `NAME:VERSION` as typed."""

    name: str
    version: int | None


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="all available versions", description="List all versions.")
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
    add_output_argument(exporting, POLICY, "where to write it", required=True)
    importing.add_argument(
        "file", metavar="FILE", type=Path, help=f"a policy as `export` or `learn` wrote it ({SUFFIX})"
    )
    importing.add_argument("--name", metavar="NAME", help="what jobs choose it by (default: what the file says)")
    for one in (listing, showing, exporting, importing):
        add_json_argument(one)


def run(arguments: argparse.Namespace) -> int:
    """Do one action."""
    configure_log("critical")  # errors are shown in a sentence
    outcome = asyncio.run(_act(arguments))
    write_result(outcome.result, outcome.text, arguments.json)
    return 0


def reference(text: str) -> PolicyReference:
    """Read `NAME` or `NAME:VERSION`.

    Raises:
        argparse.ArgumentTypeError: when the version is no whole number from 1.
    """
    name, separator, version = text.partition(":")
    if not separator:
        return PolicyReference(name, None)
    if not version.isdecimal() or int(version) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a version is a whole number from 1, as in ppo:3")
    return PolicyReference(name, int(version))


async def _act(arguments: argparse.Namespace) -> ActionResult:
    async with opened(find(os.environ)) as catalogue:
        return await _ACTIONS[arguments.action](catalogue, arguments)


async def _list(catalogue: PolicyCatalogue, _: argparse.Namespace) -> ActionResult:
    entries = await catalogue.entries()
    if catalogue.absence:
        print(f"{catalogue.absence}; these come with the package", file=sys.stderr)
    return ActionResult(table(entries), {"broker": not catalogue.absence, "policies": entries})


async def _show(catalogue: PolicyCatalogue, arguments: argparse.Namespace) -> ActionResult:
    entry, data = await catalogue.read(*arguments.policy)
    metadata, fault = _read(data)
    result = {"policy": entry, "usable": not fault, "reason": fault, "metadata": metadata}
    return ActionResult(details(entry, metadata, fault), result)


async def _export(catalogue: PolicyCatalogue, arguments: argparse.Namespace) -> ActionResult:
    entry, data = await catalogue.read(*arguments.policy)
    with writing(arguments.output):
        await asyncio.to_thread(output_files.write, Path(arguments.output), data)
    return _done(entry, f"written to {arguments.output}", {"file": str(arguments.output)})


async def _import(catalogue: PolicyCatalogue, arguments: argparse.Namespace) -> ActionResult:
    try:
        data = await asyncio.to_thread(arguments.file.read_bytes)
        metadata = PolicyFile.from_bytes(data, str(arguments.file)).metadata
    except OSError as error:
        raise CommandError(f"cannot read {arguments.file}: {error.strerror}") from error
    except PolicyFileError as error:
        raise CommandError(str(error)) from error
    name = arguments.name or metadata.policy
    stored = await catalogue.store.put(name, data, feature_version=metadata.feature_version)
    entry, _ = await catalogue.read(stored.name, stored.version)
    return _done(entry, "stored on the bus: jobs of this policy that start from now on take it", {})


def _done(entry: AvailablePolicy, what: str, more: Mapping[str, str]) -> ActionResult:
    size = f"{entry.num_bytes:,} bytes, sha256 {entry.sha256[:12]}"
    return ActionResult(f"{entry.name} version {entry.version} ({size}) {what}", {"policy": entry, **more})


def _read(data: bytes) -> tuple[PolicyMetadata | None, str]:
    """The metadata, and why this program cannot use the file."""
    try:
        return PolicyFile.from_bytes(data, "the file").metadata, ""
    except PolicyFileError as error:
        return None, str(error)


_ACTIONS: Mapping[str, Callable[[PolicyCatalogue, argparse.Namespace], Awaitable[ActionResult]]] = {
    "list": _list,
    "show": _show,
    "export": _export,
    "import": _import,
}
