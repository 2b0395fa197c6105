"""Replay: a capture in, the service that made it run over it, an outcome that compares every output out.

outcome = await replay(ReplayRequest(path, "arbitrator"))
outcome.is_equal()

`session` sets a service up, `stateless` has the bus of collector and reward service, `arbitrator` that of the
arbitrator. A service is run unchanged; what it reads that no capture holds (kernel counters, policy files) comes from
the recorded messages or from the request.
"""

from dynamix.recording.playback import RecordPlayer, ReplayError

from .arbitrator.what_if import OtherPolicy, PolicyComparison, WindowComparison
from .session import ReplayOutcome, ReplayRequest, ReplayTarget, replay

__all__ = [
    "OtherPolicy",
    "PolicyComparison",
    "RecordPlayer",
    "ReplayError",
    "ReplayOutcome",
    "ReplayRequest",
    "ReplayTarget",
    "WindowComparison",
    "replay",
]
