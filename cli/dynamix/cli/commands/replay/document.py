"""An outcome as plain data, for JSON."""

from typing import Any

import msgspec

from dynamix.recording.replay import ReplayOutcome


def document(outcome: ReplayOutcome, *, strict: bool) -> dict[str, Any]:
    """All of it; `equal` is what the exit code says, `null` where another policy was asked or it was interrupted."""
    asked = outcome.what_if is not None or outcome.interrupted
    verdict = outcome.bytes_equal if strict else outcome.is_as_promised
    return {
        "equal": None if asked else verdict,
        "bytes_equal": None if asked else outcome.bytes_equal,
        "decisions_equal": None if asked else outcome.decisions_equal,
        "times_real_time": outcome.recorded_s / outcome.wall_s if outcome.wall_s > 0 else None,
        **msgspec.to_builtins(outcome),
    }
