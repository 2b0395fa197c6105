"""What a command could not do, in a sentence for the person who typed it."""

import contextlib
from collections.abc import Iterator

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
"""Exit codes: the environment was not as needed, the command was typed wrongly, Ctrl-C."""


class CommandError(Exception):
    """Ends the command with its text on standard error.

    Attributes:
        exit_code: `FAILED` or `MISUSED`.
    """

    def __init__(self, text: str, *, exit_code: int = FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@contextlib.contextmanager
def explained(*kinds: type[Exception], exit_code: int = FAILED) -> Iterator[None]:
    """End the command with the text of an exception of these kinds."""
    try:
        yield
    except kinds as error:
        raise CommandError(str(error), exit_code=exit_code) from error
