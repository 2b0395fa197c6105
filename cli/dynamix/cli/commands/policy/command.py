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

from dynamix.arbitrator.learned.policy_file import SUFFIX, PolicyFile, PolicyFileError, PolicyMetadata
from dynamix.cli.commands.actions import ActionResult, adding_actions, run_action
from dynamix.cli.connection import find
from dynamix.cli.errors import explained, reading
from dynamix.cli.output import POLICY, add_json_argument, add_output_argument, writing
from dynamix.runtime import output_files
from dynamix.runtime.input_files import read_regular

from .catalogue import AvailablePolicy, PolicyCatalogue, details, opened, table

Act = Callable[[PolicyCatalogue, argparse.Namespace], Awaitable[ActionResult]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's actions."""
    add = adding_actions(parser)
    listing = add("list", _list, "all available versions", "List all versions.")
    what = "what one is, where it comes from, its scores"
    showing = add("show", _show, what, "Show what is known of one version.")
    exporting = add("export", _export, "write one to a file", "Write one version to a file, as it is stored.")
    what = "store a file as the next version"
    importing = add("import", _import, what, "Store a file on the bus as the next version.")
    for one in (showing, exporting):
        one.add_argument("policy", metavar="NAME[:VERSION]", type=reference, help="default: its newest version")
    add_output_argument(exporting, POLICY, "where to write it", required=True)
    what = f"a policy as `export` or `learn` wrote it ({SUFFIX})"
    importing.add_argument("file", metavar="FILE", type=Path, help=what)
    importing.add_argument("--name", metavar="NAME", help="what jobs choose it by (default: what the file says)")
    for one in (listing, showing, exporting, importing):
        add_json_argument(one)


def run(arguments: argparse.Namespace) -> int:
    """Do one action."""
    return run_action(_act(arguments), arguments)


def reference(text: str) -> tuple[str, int | None]:
    """An argument's type: `NAME` or `NAME:VERSION`, with a whole number from 1."""
    name, separator, version = text.partition(":")
    if not separator:
        return name, None
    if not version.isdecimal() or int(version) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a version is a whole number from 1, as in ppo:3")
    return name, int(version)


async def _act(arguments: argparse.Namespace) -> ActionResult:
    async with opened(find(os.environ)) as catalogue:
        act: Act = arguments.act
        return await act(catalogue, arguments)


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
    with writing(arguments.output):
        await asyncio.to_thread(output_files.write, Path(arguments.output), data)
    return _done(entry, f"written to {arguments.output}", {"file": str(arguments.output)})


async def _import(catalogue: PolicyCatalogue, arguments: argparse.Namespace) -> ActionResult:
    with reading(arguments.file), explained(PolicyFileError):
        data = await asyncio.to_thread(read_regular, arguments.file)
        metadata = PolicyFile.from_bytes(data, str(arguments.file)).metadata
        metadata.make_action_set()
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
        return PolicyFile.from_bytes(data, "the file").metadata, ""
    except PolicyFileError as error:
        return None, str(error)
