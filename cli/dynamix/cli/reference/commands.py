"""What the commands take, as Markdown."""

import argparse
import importlib
import inspect
import re
from collections.abc import Iterator

from dynamix.cli.main import PACKAGE, Parser

HEAD = "| argument | meaning |\n|---|---|\n"


def command_section(name: str) -> str:
    """A command's own words, and its arguments."""
    module = importlib.import_module(f"{PACKAGE}.{name.replace('-', '_')}.command")
    parser = Parser(prog=f"dynamix {name}")
    module.configure(parser)
    words = re.sub(r"^  (?=\S)", "    ", inspect.cleandoc(module.__doc__ or ""), flags=re.MULTILINE)  # a code block
    return f"### dynamix {name}\n\n{words}\n\n{_tables(parser)}"


def _tables(parser: Parser) -> str:
    """A table of the arguments; one for each action where the command has several."""
    inner = next((one for one in parser.actions if isinstance(one, argparse._SubParsersAction)), None)  # noqa: SLF001
    if inner is None:
        return HEAD + "".join(_rows(parser))
    parts = ((name, one) for name, one in inner.choices.items())
    return "\n".join(f"`{parser.prog} {name}`: {one.description}\n\n{_tables(one)}" for name, one in parts)


def _rows(parser: Parser) -> Iterator[str]:
    for action in parser.actions:
        if not isinstance(action, argparse._HelpAction):  # noqa: SLF001 - argparse exports no name for it
            yield f"| `{_in_cell(_spelled(action))}` | {_in_cell(_meaning(parser, action))} |\n"


def _spelled(action: argparse.Action) -> str:
    """How an argument is typed: `-o, --output FILE`."""
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices is not None:
        value = "|".join(map(str, action.choices))
    if not action.option_strings:
        return f"[{value}]" if action.nargs in ("?", "*") else value
    flags = ", ".join(action.option_strings)
    return flags if action.nargs == 0 else f"{flags} {value}"


def _meaning(parser: Parser, action: argparse.Action) -> str:
    """The help as argparse shows it, defaults filled in."""
    return (action.help or "") % {**vars(action), "prog": parser.prog}


def _in_cell(text: str) -> str:
    return text.replace("|", "\\|")
