"""Captures for tests: changed copies of others, and jobs decided as the services would."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

from bench.jobs import StreamRecorder
from tests.support import examples

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.policies.policy import Policy
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.recording.capture import CaptureHeader, CaptureWriter, Record, read_header, records
from dynamix.recording.replay import ReplayOutcome, replay
from dynamix.schemas.codec import decode_any
from dynamix.schemas.messages import Action, Job, Message, State

DEMO = Path(__file__).parents[1] / "data/demo.dxc"

Change = Callable[[Record], Record | None]


def changed(source: Path, target: Path, change: Change) -> Path:
    """A copy with each record as `change` gives it, without those that it drops."""
    return written(source, target, (kept for record in records(source) if (kept := change(record)) is not None))


def written(source: Path, target: Path, found: Iterable[Record]) -> Path:
    """A capture with the header of another."""
    with CaptureWriter(target, read_header(source)) as writer:
        for record in found:
            writer.write_record(record)
    return target


class Matching:
    """Tells the one message of a kind about a window."""

    def __init__(self, kind: str, window: int) -> None:
        self._kind, self._window = kind, window

    def __call__(self, record: Record) -> bool:
        if self._kind == "action" and record.kind == "action":
            return decode_any(record.subject, record.payload).window == self._window  # type: ignore[attr-defined]
        key = record.key
        return record.kind == self._kind and key is not None and key.window == self._window


def without(source: Path, target: Path, matching: Matching) -> Path:
    """A copy without one message."""
    return changed(source, target, lambda record: None if matching(record) else record)


def into_arbitrator(path: Path) -> ReplayOutcome:
    """Replay a capture into the arbitrator."""
    return replay(path, "arbitrator")


class JobRecording:
    """Writes a job's messages and decides as an arbitrator would: `with JobRecording(path, job) as r: ...`."""

    def __init__(self, path: Path, job: Job, policy: Policy | None = None) -> None:
        self.path = path
        self.actions: list[Action] = []
        self.last_sequence = 0
        self._writer = CaptureWriter(path, CaptureHeader.of(job.job))
        self._policy = policy
        self._states: list[tuple[int, State]] = []
        self._begin(job)

    def __enter__(self) -> Self:
        self._writer.__enter__()
        self._recorder = StreamRecorder(self._writer)
        self.store(self._job)
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.__exit__(None, None, None)

    def store(self, message: Message) -> int:
        """Append a message; its sequence."""
        self._recorder.now_ns += 1_000_000
        return self._recorder.store(message)

    def state(self, window: int, node: str = "node-a", *, is_seen: bool = True) -> None:
        """A node's state, seen by the arbitrator or not, and what it decides then."""
        layout = {one.node: one.ranks for one in self._job.nodes}
        speeds = tuple(1000.0 + 100 * ((7 * window + 3 * rank) % 5) for rank in layout[node])
        state = examples.state(node, layout[node], window, generation=self._job.generation, throughput=speeds)
        self.last_sequence = self.store(state)
        self._states.append((self.last_sequence, state))
        if is_seen:
            self.decide(self.last_sequence, state)

    def decide(self, sequence: int, state: State) -> None:
        """Fold a state and store what is decided."""
        self._fold.add_state(sequence, state)
        while (action := self._fold.close()) is not None:
            self.store(action)
            self.actions.append(action)
            self._fold.adopt(action)

    def restart(self, *, lost_until: int | None = None) -> None:
        """Another arbitrator goes on from the newest action, behind a gap if FEED has lost all up to a sequence."""
        self._fold = Fold(self._job, self._policy_of(self._job), self.actions[-1])
        if lost_until is not None:
            self._fold.start_after_gap(lost_until)
        for sequence, state in self._states:
            if sequence > self._fold.watermark and state.generation == self._job.generation:
                self.decide(sequence, state)

    def next_generation(self, job: Job) -> None:
        """The job has started again."""
        self._begin(job)
        self.store(job)

    def _begin(self, job: Job) -> None:
        self._job = job
        self._fold = Fold(job, self._policy_of(job), self.actions[-1] if self.actions else None)

    def _policy_of(self, job: Job) -> Policy:
        return self._policy or policy_named(job.policy)
