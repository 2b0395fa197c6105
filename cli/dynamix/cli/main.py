"""The `dynamix` command: finds the sub-command, imports only that one, and turns errors into exit codes.

0: done; 1: it could not be done, and standard error says why; 2: typed wrongly; 130: interrupted.
"""

import argparse
import difflib
import importlib
import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn, Protocol, cast

from .errors import CommandError

DISTRIBUTION = "dynamix-batch"
EXTRAS = {"rich": "cli", "matplotlib": "cli", "torch": "train", "tensorboard": "learn"}
"""Packages that only some commands need, and the extra that brings them."""
LEARNING = "learn"
"""A command and its extra, which brings all that it needs."""


class Command(NamedTuple):
    """A sub-command: where it lives, and what `dynamix --help` says of it without importing it."""

    name: str
    module: str
    summary: str


COMMANDS = (
    Command("demo", "dynamix.cli.demo.command", "steer a real training job on this machine, and compare with static"),
    Command("up", "dynamix.cli.up.command", "run broker and services on this machine until interrupted"),
    Command("train", "dynamix.cli.train", "start a training script with torchrun, connected to the bus"),
    Command("top", "dynamix.cli.top.command", "watch a job: batch sizes, times, throughput, accuracy, actions"),
    Command("capture", "dynamix.cli.capture.command", "record a job: all its messages into a file"),
    Command("replay", "dynamix.cli.replay.command", "play a capture into a service, and compare what it makes of it"),
    Command("inspect", "dynamix.cli.inspect.command", "show what a capture holds: windows, decisions, rewards, gaps"),
    Command("simulate", "dynamix.cli.simulate.command", "run one job on a virtual cluster"),
    Command(LEARNING, "dynamix.cli.learn", "learn a policy by PPO on virtual clusters"),
    Command("evaluate", "dynamix.cli.evaluate", "compare policies on virtual clusters, with intervals"),
    Command("tune", "dynamix.cli.tune", "choose the rivals' settings on train scenarios"),
    Command("calibrate", "dynamix.cli.calibrate.command", "fit a virtual cluster to a real job's metric windows"),
    Command("policy", "dynamix.cli.policy.command", "list, show, export and import learned policies"),
    Command("provision", "dynamix.cli.provision", "make the broker's streams, or bring them up to date"),
    Command("doctor", "dynamix.cli.doctor.command", "say what this machine has, what it lacks, and how to mend it"),
)


class CommandModule(Protocol):
    """What the module of a sub-command offers."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, namespace: argparse.Namespace) -> int:
        """Do it; returns the exit code."""


class Parser(argparse.ArgumentParser):
    """argparse that names the nearest flag for one it does not know, and never guesses from an abbreviation."""

    def __init__(self, prog: str, description: str | None, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse_args(  # type: ignore[override]  # argparse types it for namespaces of any class
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Parse all arguments; an unknown one ends the process with code 2 and a suggestion."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            self.error(f"unknown argument {unknown[0]!r}{nearest(flag, self._option_string_actions)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """End with code 2, the message and where to read more; not the whole usage."""
        self.exit(2, f"{self.prog}: {message}\nTry '{self.prog} --help'.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(overview())
        return 0 if given else 2
    if given[0] in ("-V", "--version"):
        print(f"dynamix {importlib.metadata.version(DISTRIBUTION)}")
        return 0
    command = next((command for command in COMMANDS if command.name == given[0]), None)
    if command is None:
        known = [command.name for command in COMMANDS]
        print(f"dynamix: unknown command {given[0]!r}{nearest(given[0], known)}\n{overview()}", file=sys.stderr)
        return 2
    return guarded(command.name, lambda: execute(command, given[1:]))


def execute(command: Command, arguments: Sequence[str]) -> int:
    """Import the command's module, parse its arguments, run it."""
    module = cast("CommandModule", importlib.import_module(command.module))
    parser = Parser(f"dynamix {command.name}", module.__doc__)
    module.add_arguments(parser)
    return module.run(parser.parse_args(arguments))


def guarded(name: str, work: Callable[[], int]) -> int:
    """What `work` returns; the errors that a person can cause become a line and an exit code."""
    try:
        return work()
    except ModuleNotFoundError as error:
        if (extra := EXTRAS.get(str(error.name))) is None:
            raise
        extra = LEARNING if name == LEARNING else extra
        print(f"dynamix {name}: needs the package {error.name}: pip install 'dynamix-batch[{extra}]'", file=sys.stderr)
        return 1
    except CommandError as error:
        print(f"dynamix {name}: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as exit_:  # argparse ends the process itself
        return exit_.code if isinstance(exit_.code, int) else 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output has gone, as in `dynamix doctor | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def overview() -> str:
    """The list of commands."""
    width = max(len(command.name) for command in COMMANDS) + 2
    lines = [f"  {command.name:{width}}{command.summary}" for command in COMMANDS]
    return "\n".join(
        (
            "usage: dynamix COMMAND [ARGUMENTS]",
            "",
            "Steers the batch size of every rank of a running PyTorch DDP job, over NATS.",
            "",
            *lines,
            "",
            "'dynamix COMMAND --help' says more; settings are also read from DYNAMIX_... variables.",
        )
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """`: did you mean ...?` when something known is near, otherwise nothing."""
    near = difflib.get_close_matches(word, sorted(known), n=1)
    return f": did you mean {near[0]}?" if near else ""


if __name__ == "__main__":
    sys.exit(main())
