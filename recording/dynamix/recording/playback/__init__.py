"""Playback: a capture in, its messages out as a service's bus delivers them, at full speed or at the recorded pace.

`player` reads the capture once, in order; `consumer` has the parts of a bus that hand out those messages. Which of them
a service gets, and what becomes of its outputs, is decided in `dynamix.recording.replay`.
"""

from .player import RecordPlayer, ReplayError, Speed

__all__ = ["RecordPlayer", "ReplayError", "Speed"]
