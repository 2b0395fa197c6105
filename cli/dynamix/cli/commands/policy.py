"""List, show, test, export and import learned policies of the package and on the bus.

`test` finds out whether a policy depends on its state, and whether it is faster than the best constant on train
scenarios; `import` refuses a policy that ignores its state.

A version is one file and never changes. A job takes the newest version when it starts (or its option `version`) and
keeps it until it is restarted. In a deployment `import` needs the key of `learner`; the other actions `watcher`.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from dynamix.arbitrator.learned.policy import action_set_of
from dynamix.arbitrator.learned.policy_file import SUFFIX, PolicyFile, PolicyFileError, shipped_names
from dynamix.arbitrator.learned.policy_store import PolicyStore, StoredPolicy, read_policy_file, shipped_version
from dynamix.arbitrator.learned.response import dependence, is_dead, typical_states
from dynamix.cli.arguments import add_action, add_json_argument, add_output_argument
from dynamix.cli.connection import HOW_TO_START, NoBrokerError, connected, find
from dynamix.cli.errors import CommandError, explained
from dynamix.cli.output import POLICY, ActionResult, Document, write_file, write_result
from dynamix.cli.terminal import ProgressLine, in_columns
from dynamix.runtime.bus import StreamMissingError
from dynamix.runtime.log import configure as configure_log
from dynamix.runtime.settings import redact_url
from dynamix.schemas.streams import POLICIES

HEADINGS = ("policy", "version", "from", "size", "stored", "sha256")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's actions."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = add_action(actions, "list", _list, "List all versions of all policies.")
    showing = add_action(actions, "show", _show, "Show origin, settings and scores of one version.")
    testing = add_action(actions, "test", _test, "Try a file: exit code 1 if it is dead, or worse than a constant.")
    exporting = add_action(actions, "export", _export, "Write one version to a file, as it is stored.")
    importing = add_action(actions, "import", _import, "Store a file on the bus as the next version.")
    for one in (showing, exporting):
        one.add_argument(
            "policy", metavar="NAME[:VERSION]", type=reference, help="a policy, and its version (default: the newest)"
        )
    add_output_argument(exporting, POLICY, "where to write it", required=True)
    what = f"a policy as `export` or `learn` wrote it ({SUFFIX})"
    importing.add_argument("file", metavar="FILE", type=Path, help=what)
    testing.add_argument("file", metavar="FILE", type=Path, help=what)
    testing.add_argument("--scenarios", metavar="SUITE", help="a suite, or a directory (default: its own)")
    importing.add_argument("--name", metavar="NAME", help="its name in jobs (default: the name in the file)")
    for one in (listing, showing, testing, exporting, importing):
        add_json_argument(one)


def run(arguments: argparse.Namespace) -> int:
    """Do one action."""
    configure_log("critical")  # errors are shown in a sentence

    async def act() -> ActionResult:
        if arguments.act is _test:  # without a broker
            tested: ActionResult = _test(arguments)
            return tested
        async with opened() as catalogue:
            result: ActionResult = await arguments.act(catalogue, arguments)
            return result

    text, document = asyncio.run(act())
    write_result(document, text, arguments.json)
    return 1 if document.get("faults") else 0


def reference(text: str) -> tuple[str, int | None]:
    """An argument's type: `NAME` or `NAME:VERSION`, with an integer from 1."""
    name, separator, version = text.partition(":")
    if not separator:
        return name, None
    if not version.isdecimal() or int(version) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a version is an integer from 1, as in ppo:3")
    return name, int(version)


class PolicyCatalogue(NamedTuple):
    """The learned policies that can be used here."""

    versions: list[StoredPolicy]
    """All versions: by name, the newest first; those of the package have no time."""
    store: PolicyStore | None
    """The policies on the bus."""
    absence: str = ""
    """Reason why there is no bus, in a sentence; empty when there is one."""

    def find(self, name: str, version: int | None) -> StoredPolicy:
        """A version of a policy, the newest by default. Raises CommandError when there is none."""
        for one in self.versions:
            if one.name == name and version in (None, one.version):
                return one
        wanted = name if version is None else f"{name}:{version}"
        known = ", ".join(f"{one.name}:{one.version}" for one in self.versions) or "none"
        raise CommandError(f"no learned policy {wanted}: there is {known}" + (self.absence and f" ({self.absence})"))


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[PolicyCatalogue]:
    """The catalogue; without a broker, or before it is provisioned, of the shipped policies only."""
    shipped = [one for name in shipped_names() if (one := shipped_version(name)) is not None]
    settings = find(os.environ)
    where, absence = redact_url(settings.url), ""
    try:
        async with connected(settings, "policy", wait=False) as bus:
            store, versions = PolicyStore(bus), shipped
            with explained(ValueError):
                try:
                    await bus.stream_state(POLICIES.name)
                    versions = sorted([*await store.versions(), *shipped], key=lambda one: (one.name, -one.version))
                except StreamMissingError:
                    absence = f"the broker at {where} has no stream for policies: run `dynamix provision`"
                yield PolicyCatalogue(versions, None if absence else store, absence)
    except NoBrokerError:
        yield PolicyCatalogue(shipped, None, f"no broker at {where}: {HOW_TO_START}")


async def _list(catalogue: PolicyCatalogue, _: argparse.Namespace) -> ActionResult:
    if catalogue.absence:
        print(f"{catalogue.absence}; these come with the package", file=sys.stderr)
    rows = [
        (
            one.name,
            str(one.version),
            "the bus" if one.stored_at else "the package",
            f"{len(one.data) / 1024:.0f} KB",
            one.stored_at[:19].replace("T", " ") or "-",
            one.digest.hex()[:12],
        )
        for one in catalogue.versions
    ]
    none = "no learned policies: `dynamix learn` makes one, `dynamix policy import FILE` stores one"
    text = in_columns(HEADINGS, rows, left=HEADINGS) if rows else none
    return text, {"broker": not catalogue.absence, "policies": [_document(one) for one in catalogue.versions]}


async def _show(catalogue: PolicyCatalogue, arguments: argparse.Namespace) -> ActionResult:
    found = catalogue.find(*arguments.policy)
    fault = ""
    try:
        metadata = PolicyFile.from_bytes(found.data, "the file").metadata
        action_set_of(metadata)
    except PolicyFileError as error:
        metadata, fault = None, str(error)
    result = {"policy": _document(found), "usable": not fault, "reason": fault, "metadata": metadata}
    shown = {**_document(found), "usable here": f"no: {fault}" if fault else "yes"}
    shown |= {} if metadata is None else msgspec.structs.asdict(metadata)
    shown.pop("inputs", None)  # a long list; `--json` has it
    text = "\n".join(f"  {name.replace('_', ' '):20}{msgspec.to_builtins(value)}" for name, value in shown.items())
    return f"{found.name} version {found.version}\n{text}", result


def _test(arguments: argparse.Namespace) -> ActionResult:
    """Try a file on the surrogate."""
    from dynamix.lab.learning.run import SUITE_OF
    from dynamix.lab.learning.trial import tried
    from dynamix.lab.simulator.scenario import suite_named

    with explained(ValueError, OSError):
        file = read_policy_file(arguments.file)
        suite = suite_named(arguments.scenarios or SUITE_OF[action_set_of(file.metadata).name])
    with ProgressLine() as progress:
        trial = tried(file, suite.scenarios, lambda name: progress.show(f"trying it in {name}"))
    lines = ["share of decisions that change when inputs come from another state"]
    lines += [f"  {group:28}{share:6.1%}" for group, share in trial.dependence.items()]
    lines.append(f"time to target over that of the best constant, {trial.constant} (surrogate)")
    lines += [f"  {name:28}{ratio:6.2f}" for name, ratio in trial.vs_constant.items()]
    lines.append(f"  {'all (geometric mean)':28}{trial.mean_vs_constant:6.2f}")
    lines += [f"fails: {fault}" for fault in trial.faults] or ["passes"]
    document = {**trial._asdict(), "mean_vs_constant": trial.mean_vs_constant, "faults": trial.faults}
    return "\n".join(lines), document


async def _export(catalogue: PolicyCatalogue, arguments: argparse.Namespace) -> ActionResult:
    found = catalogue.find(*arguments.policy)
    write_file(arguments.output, found.data)
    return _done(found, f"written to {arguments.output}", {"file": str(arguments.output)})


async def _import(catalogue: PolicyCatalogue, arguments: argparse.Namespace) -> ActionResult:
    with explained(PolicyFileError):
        file = read_policy_file(arguments.file)
        action_set_of(file.metadata)
    if is_dead(dependence(file, typical_states(file))):
        raise CommandError(f"{arguments.file} is dead: its choices do not depend on its state (`dynamix policy test`)")
    if catalogue.store is None:
        raise CommandError(catalogue.absence)
    stored = await catalogue.store.put(arguments.name or file.metadata.policy, file.content)
    stored = await catalogue.store.find(stored.name, stored.version) or stored  # with the time
    return _done(stored, "stored on the bus: jobs of this policy that start from now on take it", {})


def _done(policy: StoredPolicy, what: str, more: Mapping[str, str]) -> ActionResult:
    size = f"{len(policy.data):,} bytes, sha256 {policy.digest.hex()[:12]}"
    return f"{policy.name} version {policy.version} ({size}) {what}", {"policy": _document(policy), **more}


def _document(policy: StoredPolicy) -> Document:
    return {
        "name": policy.name,
        "version": policy.version,
        "origin": "bus" if policy.stored_at else "shipped",
        "num_bytes": len(policy.data),
        "sha256": policy.digest.hex(),
        "stored_at": policy.stored_at,
    }
