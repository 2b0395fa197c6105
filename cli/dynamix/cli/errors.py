"""What a command could not do, in a sentence for the person who typed it."""


class CommandError(Exception):
    """Ends the command with its text on standard error.

    Attributes:
        exit_code: 1 when the world was not as needed, 2 when the command was typed wrongly.
    """

    def __init__(self, text: str, *, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code
