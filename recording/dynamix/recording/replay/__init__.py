"""Replay: a capture played into the very services that made it, their outputs held against the recorded ones.

outcome = await replay(Replay(path, "arbitrator"))
outcome.bytes_equal
"""

from .counts import Difference, Tally
from .errors import ReplayError
from .fields import FieldPair
from .player import Speed, Tape
from .position import Place, first_generation
from .session import Into, Outcome, Replay, replay
from .what_if import Comparison, DecidedBeside, OtherPolicy

__all__ = [
    "Comparison",
    "DecidedBeside",
    "Difference",
    "FieldPair",
    "Into",
    "OtherPolicy",
    "Outcome",
    "Place",
    "Replay",
    "ReplayError",
    "Speed",
    "Tally",
    "Tape",
    "first_generation",
    "replay",
]
