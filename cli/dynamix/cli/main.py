"""The `dynamix` command: finds the sub-command, imports only that one, and turns errors into exit codes.

0: done; 1: it could not be done, and standard error says why; 2: typed wrongly; 130: interrupted. Packages add
commands by entry points of the group `dynamix.commands`, each a module of the same shape as ours.
"""

import argparse
import importlib
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points, version
from typing import Any, NoReturn

from dynamix.schemas.spelling import suggestion

from .errors import CommandError

DISTRIBUTION = "dynamix-batch"
PACKAGE = "dynamix.cli.commands"
GROUP = "dynamix.commands"
EXTRAS = {
    **dict.fromkeys(("nacl", "prometheus_client", "safetensors", "structlog", "uvloop"), "cli"),
    **dict.fromkeys(("joblib", "matplotlib", "rich", "scipy", "starlette", "uvicorn"), "cli"),
    "torch": "train",
    "pyarrow": "tables",
}
"""Packages that only some commands need, and the extra that brings them."""
COMMANDS = {
    "demo": "Train a real job on this machine three times: fixed, divided and adaptive batch sizes",
    "up": "Run broker and services on this machine until interrupted",
    "watch": "Start a training script unchanged, and tell which rank, link or loader is slow",
    "train": "Start a training script with torchrun, connected to the bus",
    "serve-gradients": "Sum parts of a job's gradients in a separate process (a parameter server)",
    "top": "Watch a job: batch sizes, times, throughput, accuracy, decisions",
    "dashboard": "Show jobs, services and captures as a web page",
    "capture": "Record a job: all its messages into one file",
    "replay": "Replay a capture into a service, and compare its output with the recorded one",
    "inspect": "Show what a capture holds: windows, decisions, rewards, gaps",
    "simulate": "Run one job on a virtual cluster",
    "learn": "Learn a policy by PPO on a surrogate of virtual clusters",
    "evaluate": "Compare policies on virtual clusters; tune the baselines",
    "policy": "List, show, export and import learned policies",
    "provision": "Create the broker's streams, or bring them up to date",
    "keys": "Create, revoke and list the broker's keys",
    "doctor": "Check what this machine has, what is missing, and how to fix it",
}
"""Modules of `dynamix.cli.commands`, with '_' for '-', in the order of `dynamix --help`; and what each does."""


class Parser(argparse.ArgumentParser):
    """argparse that names the nearest flag for one it does not know, and never guesses from an abbreviation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    @property
    def actions(self) -> list[argparse.Action]:
        """All arguments that were declared, in order."""
        return self._actions

    def parse_args(  # type: ignore[override]  # argparse types it for namespaces of any class
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Parse all arguments; an unknown one ends the process with code 2 and a suggestion."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            self.error(f"unknown argument {unknown[0]!r}{suggestion(flag, self._option_string_actions)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """End with code 2, the message and where to read more; not the whole usage."""
        self.exit(2, f"{self.prog}: {message}\nTry '{self.prog} --help'.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by `>&-`: the next file or socket would take its number
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):  # a locale that lacks a character shows `?` instead of ending us
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        exit_code = dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # here, and not as the interpreter ends, which would show a traceback
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone, as in `dynamix doctor | head -1`
            return 128 + signal.SIGPIPE
        print(f"dynamix: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return exit_code


def dispatch(given: Sequence[str]) -> int:
    """Show help, or run the command that is named first; returns the exit code."""
    if not given or given[0] in ("-h", "--help"):
        print(overview())
        return 0 if given else 2
    if given[0] in ("-V", "--version"):
        print(f"dynamix {version(DISTRIBUTION)}")
        return 0
    name = given[0]
    if name not in (names := command_names()):
        print(f"dynamix: unknown command {name!r}{suggestion(name, names)}\n{overview()}", file=sys.stderr)
        return 2
    return guarded(name, lambda: execute(name, given[1:]))


def command_names() -> list[str]:
    """All commands: ours, then those of extensions."""
    return [*COMMANDS, *sorted({entry.name for entry in entry_points(group=GROUP)} - COMMANDS.keys())]


def command_module(name: str) -> Any:
    """The module of a command: its docstring is the help, `configure(parser)` and `run(arguments)` are called."""
    if name in COMMANDS:
        return importlib.import_module(f"{PACKAGE}.{name.replace('-', '_')}")
    found = list(entry_points(group=GROUP, name=name))
    if len(found) > 1:
        raise CommandError(f"{len(found)} packages register the command {name!r}: uninstall all but one of them")
    return found[0].load()


def execute(name: str, arguments: Sequence[str]) -> int:
    """Import the command's module, parse its arguments, run it."""
    from .arguments import check_outputs  # noqa: PLC0415 - only once a command runs

    module = command_module(name)
    parser = Parser(prog=f"dynamix {name}", description=module.__doc__)
    module.configure(parser)
    parsed = parser.parse_args(arguments)
    check_outputs(parsed)
    # Without a home that it can write Matplotlib takes a temporary directory, and warns about it in two lines.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    exit_code: int = module.run(parsed)
    return exit_code


def guarded(name: str, work: Callable[[], int]) -> int:
    """The result of `work`; the errors that a person can cause become a line and an exit code."""
    try:
        return work()
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if (extra := EXTRAS.get(package)) is None:
            raise
        print(f"dynamix {name}: needs the package {package}: pip install 'dynamix-batch[{extra}]'", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone, which is not a failure
        raise
    except CommandError as error:
        print(f"dynamix {name}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        named = error.strerror and error.filename is not None
        print(f"dynamix {name}: {f'{error.strerror}: {error.filename}' if named else error}", file=sys.stderr)
        return 1
    except SystemExit as exit_:  # argparse ends the process itself
        return exit_.code if isinstance(exit_.code, int) else 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT


def overview() -> str:
    """The list of commands."""
    lines = [f"  {name:{max(map(len, COMMANDS)) + 2}}{what}" for name, what in COMMANDS.items()]
    lines += ["", f"Extensions: {', '.join(more)}"] if (more := command_names()[len(COMMANDS) :]) else []
    usage = "usage: dynamix COMMAND [ARGUMENTS]"
    what = "Steers the batch size of every rank of a running PyTorch DDP job, over NATS."
    more_help = "'dynamix COMMAND --help' explains a command; settings are also read from DYNAMIX_... variables."
    return "\n".join((usage, "", what, "", *lines, "", more_help))


if __name__ == "__main__":
    sys.exit(main())
