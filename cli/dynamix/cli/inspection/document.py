"""An inspection as a JSON document, for `--json`: all but packed and opaque fields."""

from collections.abc import Iterable

import msgspec

from dynamix.cli.output import Document, document_of
from dynamix.recording.capture import Fingerprint, differences

from .inspection import Inspection
from .window import CapturedWindow

OPAQUE = ("carry",)
"""A policy's memory means something to that policy only."""


def document(inspection: Inspection, here: Fingerprint, windows: Iterable[CapturedWindow]) -> Document:
    """The capture and some of its windows, with the units in the names."""
    nodes = inspection.nodes
    return {
        "capture": msgspec.to_builtins(inspection.header),
        "end": None if inspection.end is None else msgspec.to_builtins(inspection.end),
        "cut_off": inspection.cut_off or None,
        "fingerprint_differences": differences(inspection.header.fingerprint, here),
        "num_records": inspection.num_records,
        "num_payload_bytes": inspection.num_payload_bytes,
        "first_ns": inspection.first_ns or None,
        "last_ns": inspection.last_ns or None,
        "kinds": dict(sorted(inspection.kinds.items())),
        "malformed": [{"subject": subject, "reason": reason} for subject, reason in inspection.malformed],
        "chain_fault": inspection.chain_fault or None,
        "jobs": [document_of(job) for job in inspection.jobs],
        "events": [document_of(event) for event in inspection.events],
        "gaps": [
            {"generation": gap.generation, "window": gap.window, "missing": list(gap.missing(nodes[gap.generation]))}
            for gap in inspection.gaps()
        ],
        "windows": [_window(window) for window in windows],
    }


def _window(window: CapturedWindow) -> Document:
    return {
        "generation": window.generation,
        "window": window.window,
        "started_ns": window.started_ns or None,
        "metrics": None if window.metrics is None else document_of(window.metrics),
        "local_batch_sizes": list(window.sizes),
        "probes": sorted(window.probes),
        "mean_reward": window.mean_reward,
        "action": None if window.action is None else document_of(window.action, leave_out=OPAQUE),
        "decided_ns": window.decided_ns or None,
        "decision_s": window.decision_s,
        "applied": [document_of(applied) for applied in window.applied],
        "num_doubles": window.num_doubles,
        "ranks": [
            {
                "rank": rank,
                "metrics": None if metrics is None else document_of(metrics),
                "reward": None if reward is None else document_of(reward),
            }
            for rank, (metrics, reward) in sorted(window.detailed.items())
        ],
    }
