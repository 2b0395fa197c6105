"""Errors of commands, each in a sentence for the person who typed it."""

import contextlib
from collections.abc import Iterator

from dynamix.runtime.output_files import RefusedOutputError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
"""Exit codes: the environment was not as needed, the command was typed wrongly, Ctrl-C."""


class CommandError(Exception):
    """Ends the command with its text on standard error, and with `exit_code`."""

    def __init__(self, text: str, *, exit_code: int = FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class MisuseError(CommandError):
    """The command was typed wrongly."""

    def __init__(self, text: str) -> None:
        super().__init__(text, exit_code=MISUSED)


@contextlib.contextmanager
def explained(*kinds: type[Exception], exit_code: int = FAILED) -> Iterator[None]:
    """End the command with the message of an exception of these kinds; a refused output is always an error of usage."""
    try:
        yield
    except RefusedOutputError as error:
        raise MisuseError(str(error)) from error
    except kinds as error:
        raise CommandError(str(error), exit_code=exit_code) from error


@contextlib.contextmanager
def reading(path: object, *, exit_code: int = FAILED) -> Iterator[None]:
    """End the command with a sentence when the file cannot be read."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror or error}", exit_code=exit_code) from error
