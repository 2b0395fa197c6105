"""List, show and forget what the runs of job families taught.

A job that names its family (`attach(..., family=...)`) begins with what earlier runs of it taught: times by rank,
links, the noise scale. In a deployment `forget` needs the broker's user `provision`; the rest, `watcher`.
"""

import argparse
import os
from collections.abc import Awaitable, Callable

from dynamix.cli.commands.actions import ActionResult, adding_actions, run_action
from dynamix.cli.connection import connected, find
from dynamix.cli.errors import explained
from dynamix.cli.output import add_json_argument
from dynamix.runtime.bus import Bus, BusError
from dynamix.schemas import subjects
from dynamix.schemas.messages import JobProfile
from dynamix.schemas.streams import JOBS, PROFILES
from dynamix.schemas.subjects import check_token

from .stored import details, document, families, family_named, table

CONNECT_TIMEOUT_S = 5.0

Act = Callable[[Bus, argparse.Namespace], Awaitable[ActionResult]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's actions."""
    add = adding_actions(parser)
    listing = add("list", _list, "all families", "List all families, with their newest runs.")
    showing = add("show", _show, "what is known of one", "Show what the runs of one family taught.")
    description = "Forget a family: its next run begins as the first one did. Runs that began with it go on."
    forgetting = add("forget", _forget, "remove one", description)
    for one in (showing, forgetting):
        one.add_argument("family", metavar="FAMILY", type=family_name, help="its name, as `list` shows it")
    for one in (listing, showing, forgetting):
        add_json_argument(one)


def run(arguments: argparse.Namespace) -> int:
    """Do one action."""
    return run_action(_act(arguments), arguments)


def family_name(text: str) -> str:
    """An argument's type: the name of a family."""
    try:
        return check_token(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


async def _act(arguments: argparse.Namespace) -> ActionResult:
    async with connected(find(os.environ), "family", timeout_s=CONNECT_TIMEOUT_S, wait=False) as bus:
        with explained(ValueError, BusError):
            act: Act = arguments.act
            return await act(bus, arguments)


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
    await bus.publish_profile(mark, expected_last=0 if newest is None else newest.sequence)
    num_forgotten = await bus.purge(PROFILES.name, subject, keep=1)
    text = f"{arguments.family}: {num_forgotten} stored versions forgotten"
    return text, {"family": arguments.family, "versions_forgotten": num_forgotten}
