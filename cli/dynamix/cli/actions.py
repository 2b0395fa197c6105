"""Commands of several actions on the bus: `dynamix COMMAND ACTION ...`, each with a result for people and as data."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from dynamix.runtime.log import configure as configure_log

from .output import Document, write_result

ActionResult = tuple[str, Document]
"""The result of an action: text for people, data for `--json`."""
AddAction = Callable[[str, Callable[..., Awaitable[ActionResult]], str, str], argparse.ArgumentParser]
"""Name, what does it, a line for the list of actions, a description; returns the action's parser."""


def adding_actions(parser: argparse.ArgumentParser) -> AddAction:
    """Return a function that declares the actions of a command; the chosen one is `arguments.act`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    def add(
        name: str, act: Callable[..., Awaitable[ActionResult]], what: str, description: str
    ) -> argparse.ArgumentParser:
        one: argparse.ArgumentParser = actions.add_parser(name, help=what, description=description)
        one.set_defaults(act=act)
        return one

    return add


def run_action(acting: Coroutine[Any, Any, ActionResult], arguments: argparse.Namespace) -> int:
    """Do one action and write its result; the exit code."""
    configure_log("critical")  # errors are shown in a sentence
    text, result = asyncio.run(acting)
    write_result(result, text, arguments.json)
    return 0
