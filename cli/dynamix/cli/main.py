"""The `dynamix` command: finds the sub-command, imports only that one, and turns errors into exit codes.

0: done; 1: it could not be done, and standard error says why; 2: typed wrongly; 130: interrupted.
"""

import argparse
import importlib
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from dynamix.schemas.spelling import suggestion

from .errors import CommandError

DISTRIBUTION = "dynamix-batch"
PACKAGE = "dynamix.cli.commands"
EXTRAS = {
    "rich": "cli",
    "matplotlib": "cli",
    "torch": "train",
    **dict.fromkeys(("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter"), "otel"),
    "starlette": "dashboard",
    "uvicorn": "dashboard",
    "pyarrow": "tables",
}
"""Packages that only some commands need, and the extra that brings them."""
LEARN = "learn"
"""A command and its extra, which brings everything that it needs."""
COMMANDS = (
    *("demo", "up", "train", "serve-gradients", "top", "dashboard", "capture", "replay", "inspect", "export", "trace"),
    *("simulate", "learn", "evaluate", "tune", "calibrate", "policy", "family", "provision", "keys", "doctor"),
)
"""Folders of `dynamix.cli.commands`, with '_' for '-', in the order of `dynamix --help`."""


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


class LostOutputError(Exception):
    """Standard output cannot be written. It is no OSError, which commands take for an error of their own files."""


class StandardOutput(io.FileIO):
    """Standard output, whose errors are told from those of files."""

    def write(self, data: Any) -> int:
        """Write, as FileIO does. Raises LostOutputError, and BrokenPipeError where the reader has gone."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise LostOutputError(f"standard output cannot be written: {error.strerror}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    _replace_closed()
    if (given := sys.stdout) is sys.__stdout__ and isinstance(given, io.TextIOWrapper):
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(StandardOutput(given.fileno(), "w", closefd=False)),
            encoding=given.encoding,
            line_buffering=given.line_buffering,
            write_through=given.write_through,
        )
    for stream in (sys.stdout, sys.stderr):  # a locale that lacks a character shows `?` instead of ending us
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        exit_code = dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # here, and not as the interpreter ends, which would show a traceback
    except (BrokenPipeError, LostOutputError) as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone, as in `dynamix doctor | head -1`
            return 128 + signal.SIGPIPE
        print(f"dynamix: {error}", file=sys.stderr)
        return 1
    return exit_code


def _replace_closed() -> None:
    """Where we were started without one of the three streams, as by `>&-`, nothing is read and all is thrown away.

    Otherwise the next file or socket would take its number, and what is printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: that of this stream
            setattr(sys, name, open(descriptor, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 - for all of our life


def dispatch(given: Sequence[str]) -> int:
    """Show help, or run the command that is named first; returns the exit code."""
    if not given or given[0] in ("-h", "--help"):
        print(overview())
        return 0 if given else 2
    if given[0] in ("-V", "--version"):
        from importlib.metadata import version  # noqa: PLC0415 - half of the time of `dynamix --help`

        print(f"dynamix {version(DISTRIBUTION)}")
        return 0
    name = given[0]
    if name not in COMMANDS:
        print(f"dynamix: unknown command {name!r}{suggestion(name, COMMANDS)}\n{overview()}", file=sys.stderr)
        return 2
    return guarded(name, lambda: execute(name, given[1:]))


def execute(name: str, arguments: Sequence[str]) -> int:
    """Import the command's module, parse its arguments, run it."""
    from .output import check_distinct  # noqa: PLC0415 - msgspec: only once a command runs

    module = importlib.import_module(f"{PACKAGE}.{name.replace('-', '_')}.command")
    parser = Parser(prog=f"dynamix {name}", description=module.__doc__)
    module.configure(parser)
    parsed = parser.parse_args(arguments)
    check_distinct(parsed)
    # Without a home that it can write Matplotlib takes a temporary directory, and warns about it in two lines.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    exit_code: int = module.run(parsed)
    return exit_code


def guarded(name: str, work: Callable[[], int]) -> int:
    """What `work` returns; the errors that a person can cause become a line and an exit code."""
    try:
        return work()
    except ModuleNotFoundError as error:
        if (extra := EXTRAS.get(str(error.name))) is None:
            raise
        extra = LEARN if name == LEARN else extra
        print(f"dynamix {name}: needs the package {error.name}: pip install 'dynamix-batch[{extra}]'", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone, which is no failure
        raise
    except (CommandError, OSError, RecursionError) as error:
        print(f"dynamix {name}: {_reason(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, CommandError) else 1
    except SystemExit as exit_:  # argparse ends the process itself
        return exit_.code if isinstance(exit_.code, int) else 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT


def _reason(error: CommandError | OSError | RecursionError) -> str:
    """What a person is told about an error that a person can cause."""
    if isinstance(error, RecursionError):
        return "what was read is nested too deeply"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return str(error)


def overview() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{summary(name)}" for name in COMMANDS]
    usage = "usage: dynamix COMMAND [ARGUMENTS]"
    what = "Steers the batch size of every rank of a running PyTorch DDP job, over NATS."
    more = "'dynamix COMMAND --help' says more; settings are also read from DYNAMIX_... variables."
    return "\n".join((usage, "", what, "", *lines, "", more))


def summary(name: str) -> str:
    """What a command does, in a line: how the docstring of its folder begins."""
    return (importlib.import_module(f"{PACKAGE}.{name.replace('-', '_')}").__doc__ or "").partition("\n")[0].rstrip(".")


if __name__ == "__main__":
    sys.exit(main())
