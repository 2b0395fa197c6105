"""List, show and forget what the runs of job families learned.

A job that names its family (`attach(..., family=...)`) starts from what earlier runs learned: times by rank, links,
and which learning rate was best. In a deployment `forget` needs the key of `provision`; the other actions `watcher`.
"""

import argparse
import asyncio
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from dynamix.arbitrator.policies.rule import FIRST_ARM, score
from dynamix.cli.arguments import add_action, add_json_argument
from dynamix.cli.connection import connected, find
from dynamix.cli.errors import CommandError, explained
from dynamix.cli.output import ActionResult, write_result
from dynamix.cli.terminal import in_columns, sizes_text
from dynamix.runtime.bus import Bus, BusError, BusMessage, StreamMissingError
from dynamix.runtime.log import configure as configure_log
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import ArmRecord, JobProfile
from dynamix.schemas.streams import JOBS, PROFILES
from dynamix.schemas.subjects import check_token

HEADINGS = ("family", "runs", "newest", "policy", "ranks", "windows", "last sizes", "size")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's actions."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = add_action(actions, "list", _list, "List all families, with their newest runs.")
    showing = add_action(actions, "show", _show, "Show what the runs of one family learned.")
    what = "Forget a family: its next run starts cold. Running jobs are not affected."
    forgetting = add_action(actions, "forget", _forget, what)
    for one in (showing, forgetting):
        one.add_argument("family", metavar="FAMILY", type=family_name, help="the family's name, as `list` shows it")
    for one in (listing, showing, forgetting):
        add_json_argument(one)


def run(arguments: argparse.Namespace) -> int:
    """Do one action."""
    configure_log("critical")  # errors are shown in a sentence

    async def act() -> ActionResult:
        async with connected(find(os.environ), "family", wait=False) as bus:
            with explained(ValueError, BusError):
                result: ActionResult = await arguments.act(bus, arguments)
                return result

    text, result = asyncio.run(act())
    write_result(result, text, arguments.json)
    return 0


def family_name(text: str) -> str:
    """An argument's type: the name of a family."""
    try:
        return check_token(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


async def _list(bus: Bus, _: argparse.Namespace) -> ActionResult:
    found = await families(bus)
    return table(found), {"families": [document(one) for one in found]}


async def _show(bus: Bus, arguments: argparse.Namespace) -> ActionResult:
    found = await family_named(bus, arguments.family)
    return details(found), {"family": document(found)}


async def _forget(bus: Bus, arguments: argparse.Namespace) -> ActionResult:
    await family_named(bus, arguments.family)
    subject, jobs = subjects.of("profile", arguments.family), await bus.stream_state(JOBS.name)
    newest = await bus.last(PROFILES.name, subject)
    mark = JobProfile.forgotten(arguments.family, jobs.last_sequence)
    await bus.publish_next(mark, expected_last=0 if newest is None else newest.sequence)
    num_forgotten = await bus.purge(PROFILES.name, subject, keep=1)
    text = f"{arguments.family}: {num_forgotten} stored versions forgotten"
    return text, {"family": arguments.family, "versions_forgotten": num_forgotten}


class StoredFamily(msgspec.Struct, frozen=True, kw_only=True):
    """The newest profile of a family."""

    family: str
    num_bytes: int
    stored_at_ns: int
    """When the broker stored it, since the Unix epoch."""
    profile: JobProfile | None = None
    fault: str = ""
    """Reason why this program cannot use it; empty when it can."""


async def families(bus: Bus) -> list[StoredFamily]:
    """All families but forgotten ones, by name. Raises CommandError when the broker has no stream for them."""
    stored = bus.stored(PROFILES.name, [subjects.of("profile", subjects.ANY)], "last_per_subject")
    try:
        found = [_read(message) async for message in stored]
    except StreamMissingError:
        raise CommandError("the broker has no stream for job families: run `dynamix provision`") from None
    known = [one for one in found if one.profile is None or not one.profile.is_forgotten]
    return sorted(known, key=lambda one: one.family)


async def family_named(bus: Bus, name: str) -> StoredFamily:
    """A family's profile. Raises CommandError, with the existing families, if there is none."""
    found = await families(bus)
    for one in found:
        if one.family == name:
            return one
    known = ", ".join(one.family for one in found) or "none"
    raise CommandError(f"nothing is stored of a family {name!r}: there is {known}")


def table(found: Sequence[StoredFamily]) -> str:
    """One line per family."""
    if not found:
        return "no job families: a job has one with attach(..., family='auto'), and leaves what it learned at its end"
    rows = []
    for one in found:
        size, profile = f"{one.num_bytes / 1024:.1f} KB", one.profile
        if profile is None:
            rows.append((one.family, "?", "cannot be used here: `dynamix family show`", "", "", "", "", size))
            continue
        policy = f"{profile.policy} {profile.policy_version}"
        counts = (str(profile.world_size), str(profile.num_windows))
        rows.append((one.family, str(profile.run), profile.job, policy, *counts, _sizes(profile), size))
    return in_columns(HEADINGS, rows, left=HEADINGS)


def document(one: StoredFamily) -> dict[str, Any]:
    """One family as data, without the bytes that only its policy reads."""
    found: dict[str, Any] = {"family": one.family, "usable": not one.fault, "reason": one.fault}
    found |= {"num_bytes": one.num_bytes, "stored_at_ns": one.stored_at_ns}
    if (profile := one.profile) is not None:
        found |= {name: value for name, value in msgspec.structs.asdict(profile).items() if name != "memory"}
        found |= {"arms": [msgspec.structs.asdict(each) for each in profile.arms]}
        found |= {"exchange": profile.allocation.exchange.label, "memory_bytes": len(profile.memory)}
    return found


def details(one: StoredFamily) -> str:
    """One family, a property per line."""
    properties = [("usable here", f"no: {one.fault}" if one.fault else "yes")]
    if (profile := one.profile) is not None:
        last = profile.allocation
        properties += [
            ("runs", str(profile.run)),
            ("newest run", f"{profile.job}, generation {profile.generation}, {profile.num_windows} windows"),
            ("policy", f"{profile.policy} version {profile.policy_version}"),
            ("ranks", str(profile.world_size)),
            ("last allocation", f"{_sizes(profile)} ({last.split}), {last.exchange.label}"),
            ("times", f"{len(profile.memory):,} bytes" if profile.memory else "none"),
            *(("tried", text) for text in _records(profile.arms)),
        ]
    lines = (f"  {name:20}{value}" for name, value in properties)
    return "\n".join([f"{one.family}, {one.num_bytes:,} bytes", *lines])


def _read(message: BusMessage) -> StoredFamily:
    family = subjects.parse(message.subject).tokens[0]
    profile, fault = None, ""
    try:
        profile = decode(JobProfile, message.subject, message.payload)
    except MalformedMessageError as error:
        fault = str(error)
    num_bytes, stored_at_ns = len(message.payload), message.timestamp_ns
    return StoredFamily(family=family, num_bytes=num_bytes, stored_at_ns=stored_at_ns, profile=profile, fault=fault)


def _records(records: Sequence[ArmRecord]) -> Iterator[str]:
    """Times of each arm, and their ratio to the first run's."""
    first = next((record for record in records if record.rate_factor == FIRST_ARM), None)
    for record in records:
        ratio = math.nan if first is None or record is first else score(record, first)
        ended = f", {record.num_stopped} stopped" if record.num_stopped else ""
        reached = [time_s for time_s in record.milestones if time_s]
        until = f", {reached[-1]:.4g} s to the last of {len(reached)} levels" if reached else ""
        compared = "" if math.isnan(ratio) else f", {ratio:.2f} of the first"
        yield f"{record.label}: {record.num_runs} runs{ended}{until}{compared}"


def _sizes(profile: JobProfile) -> str:
    sizes = profile.allocation.local_batch_sizes
    return f"{sizes_text(sizes)} = {sum(sizes)}"
