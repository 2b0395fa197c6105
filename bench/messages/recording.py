"""A recording made without a broker: a job of any size, all its messages as its services would have stored them.

Every message is what the services' own functions give for the one before it, so that a replay of it must be equal.
"""

from pathlib import Path

import msgspec
import numpy as np

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.recording.capture import CaptureHeader, CaptureWriter, Record
from dynamix.reward.formula import Weights, reward_of
from dynamix.schemas import codec, subjects
from dynamix.schemas.features import state_of
from dynamix.schemas.kinds import BY_STRUCT
from dynamix.schemas.messages import Action, Applied, Job, Message, NodeRanks

from .load import NUM_VARIANTS, NodeWindow, job_of, node_window

BEGIN_NS = 1_795_000_000 * 10**9
PERIOD_NS = 10**9
"""One window a second."""
STEP_NS = 1000
"""Between two messages of a window."""
LAG = 2
"""Windows from a decision to its effect."""


class StreamRecorder:
    """Stores messages as a broker would: a sequence for each in its stream, and the time."""

    def __init__(self, writer: CaptureWriter) -> None:
        self.now_ns = BEGIN_NS
        self._writer = writer
        self._sequences: dict[str, int] = {}

    def store(self, message: Message) -> int:
        """Append a message; its sequence."""
        stream = BY_STRUCT[type(message)].carrier
        sequence = self._sequences[stream] = self._sequences.get(stream, 0) + 1
        self.now_ns += STEP_NS
        named = (subjects.subject_of(message), codec.message_id(message), codec.encode(message))
        self._writer.write_record(Record(stream, sequence, self.now_ns, *named))
        return sequence


def write_recording(path: Path, *, num_workers: int, num_windows: int, policy: str = "rule", seed: int = 0) -> None:
    """Write a capture of a job of nodes of eight ranks, one window a second, from its start to its end."""
    job = job_of("bench-0a1b2c3d", num_workers, policy)
    nodes = [_variants(job, node, (seed, index)) for index, node in enumerate(job.nodes)]
    fold = Fold(job, policy_named(policy), None)
    with CaptureWriter(path, CaptureHeader.of(job.job), overwrite=True) as writer:
        recorder = StreamRecorder(writer)
        recorder.store(job)
        decided: list[Action] = []
        for window in range(num_windows):
            recorder.now_ns = max(recorder.now_ns, BEGIN_NS + window * PERIOD_NS)
            decided += _record_window(recorder, fold, [node[window % NUM_VARIANTS].at(window) for node in nodes])
            if window >= LAG:
                recorder.store(_applied(decided[window - LAG], job))
        recorder.store(msgspec.structs.replace(job, phase="ended", end_reason="finished"))


def _variants(job: Job, node: NodeRanks, seed: tuple[int, int]) -> list[NodeWindow]:
    rng = np.random.default_rng(seed)
    return [node_window(job, node, rng) for _ in range(NUM_VARIANTS)]


def _record_window(recorder: StreamRecorder, fold: Fold, nodes: list[NodeWindow]) -> list[Action]:
    """Store what comes of one window of all nodes; the decisions."""
    for node in nodes:
        recorder.store(node.report)
    windows = [node.collected() for node in nodes]
    for window in windows:
        recorder.store(window)
        state = state_of(window)
        fold.add_state(recorder.store(state), state)
    actions = []
    while (action := fold.close()) is not None:
        recorder.store(action)
        fold.adopt(action)
        actions.append(action)
    for window in windows:
        recorder.store(reward_of(window, Weights()))
    return actions


def _applied(action: Action, job: Job) -> Applied:
    effective = action.window + LAG
    return Applied(
        job=job.job,
        generation=action.generation,
        decided_window=action.window,
        effective_window=effective,
        effective_step=effective * job.window_steps,
        local_batch_sizes=action.local_batch_sizes,
        action_hash=action.hash,
    )
