"""What ends a replay before it can say anything, and what makes it begin a service anew."""

from dynamix.runtime.bus import BusError


class ReplayError(RuntimeError):
    """A capture that cannot be replayed as it was asked for; the text says what is missing and what would mend it."""


class RecordedRestartError(BusError):
    """The recorded service was started again here and went on after a gap; like any error of a bus it ends ours."""
