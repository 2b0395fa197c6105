"""Captures that replay equal, and those that differ."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import examples, learned
from tests.support.recordings import DEMO, JobRecording, Matching, changed, into_arbitrator, without, written

from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.policies.baselines import Proportional
from dynamix.collector.agent import trace_of
from dynamix.collector.window import simulated_window
from dynamix.recording.capture import CaptureError, Record, records
from dynamix.recording.replay import ReplayError, ReplayTarget, agree, replay
from dynamix.reward.service import RewardSettings
from dynamix.schemas.codec import decode
from dynamix.schemas.features import state_of
from dynamix.schemas.messages import FieldView, Job, SeenTrace, SystemMetrics
from dynamix.schemas.streams import ACTIONS, FEED, JOBS

TWO_NODES = examples.job()
ONE_NODE = examples.job({"node-a": (0, 1)})


def both_nodes(recording: JobRecording, *windows: int, is_seen: bool = True) -> None:
    for window in windows:
        recording.state(window, "node-a", is_seen=is_seen)
        recording.state(window, "node-b", is_seen=is_seen)


@pytest.mark.parametrize(("into", "num_outputs"), [("collector", 60), ("reward", 30), ("arbitrator", 30)])
def test_the_demo_replays_byte_for_byte(into: ReplayTarget, num_outputs: int) -> None:
    """Whatever build made it: who changes what is decided, or how it is written, changes this file on purpose."""
    outcome = replay(DEMO, into)
    counts = outcome.counts
    assert (counts.num_compared, counts.num_equal, counts.num_outside) == (num_outputs, num_outputs, 0)
    assert outcome.bytes_equal
    assert counts.differences == []


def test_the_traces_of_an_agent_are_replayed_with_its_windows(tmp_path: Path) -> None:
    job = examples.job({"node-a": (0, 1)}, policy="stigmergy")
    path = tmp_path / "traces.dxc"
    with JobRecording(path, job) as recording:
        for window in range(3):
            own = SeenTrace(strength=1.0, appetite=512.0, waiting_s=0.02) if window else None
            view = FieldView(activity=(1000.0 * window,) * 2, own=own, keeps_global_batch=False)
            processes = (SystemMetrics(cpu_time_ratio=0.9), SystemMetrics(cpu_time_ratio=0.4))
            report = examples.report(window=window, field=view, simulated=processes)
            measured, trace = simulated_window(report), trace_of(report)
            for message in (report, *((trace, measured) if window == 1 else (measured, trace)), state_of(measured)):
                recording.store(message)
    outcome = replay(path, "collector")
    assert (outcome.counts.num_compared, outcome.counts.num_equal) == (9, 9)


def test_a_capture_with_arbitrator_restarts_replays_equal(tmp_path: Path) -> None:
    """One restart in the middle of a window, and one while undecided states are stored."""
    with JobRecording(tmp_path / "job.dxc", TWO_NODES) as recording:
        for window in range(12):
            recording.state(window, "node-a", is_seen=window not in (8, 9))
            if window == 3:
                recording.restart()
            recording.state(window, "node-b", is_seen=window not in (8, 9))
            if window == 9:
                recording.restart()
    assert [action.window for action in recording.actions] == list(range(12))
    outcome = into_arbitrator(recording.path)
    assert (outcome.counts.num_compared, outcome.counts.num_equal, outcome.counts.notes) == (12, 12, [])


def test_a_restart_after_a_gap_replays_equal(tmp_path: Path) -> None:
    with JobRecording(tmp_path / "job.dxc", TWO_NODES) as recording:
        both_nodes(recording, *range(5))
        both_nodes(recording, *range(5, 9), is_seen=False)  # no arbitrator decides, and FEED drops them
        recording.restart(lost_until=recording.last_sequence)
        both_nodes(recording, *range(9, 14))
    assert [(action.window, action.gap) for action in recording.actions][4:7] == [(4, False), (9, True), (10, False)]
    outcome = into_arbitrator(recording.path)
    assert (outcome.counts.num_compared, outcome.counts.num_equal) == (10, 10)
    assert outcome.counts.notes == ["the recorded arbitrator restarted after a gap, before window 9"]


def test_a_past_capture_with_the_specification_last_replays_equal(tmp_path: Path) -> None:
    found = [record for record in records(DEMO) if record.stream != JOBS.name]
    last = [record for record in records(DEMO) if record.stream == JOBS.name][-1]
    assert decode(Job, last.subject, last.payload).phase == "ended"
    outcome = into_arbitrator(written(DEMO, tmp_path / "past.dxc", [*found, last]))
    assert (outcome.counts.num_compared, outcome.bytes_equal) == (30, True)


def test_a_capture_from_the_middle_of_a_job_continues_from_an_action(tmp_path: Path) -> None:
    middle = next(one.sequence for one in records(DEMO) if Matching("state", 10)(one))
    later = (one for one in records(DEMO) if one.stream != FEED.name or one.sequence >= middle)
    outcome = into_arbitrator(written(DEMO, tmp_path / "middle.dxc", later))
    counts = outcome.counts
    assert (counts.num_compared, counts.num_equal, counts.num_uncompared) == (19, 19, 11)
    assert not outcome.is_equal()
    assert "begins after the action at 11" in counts.notes[0], "that for window 9 needs the state of window 9"


def test_an_earlier_generation_without_its_specification_is_left_out(tmp_path: Path) -> None:
    restarted = msgspec.structs.replace(TWO_NODES, generation=1)
    with JobRecording(tmp_path / "job.dxc", TWO_NODES) as recording:
        for generation in range(2):
            both_nodes(recording, *range(6))
            if generation == 0:
                recording.next_generation(restarted)
    both = into_arbitrator(recording.path)
    assert (both.counts.num_compared, both.counts.num_equal) == (12, 12)
    first = next(record for record in records(recording.path) if record.stream == JOBS.name)
    newest = changed(recording.path, tmp_path / "newest.dxc", lambda record: None if record == first else record)
    outcome = into_arbitrator(newest)
    assert (outcome.counts.num_compared, outcome.counts.num_equal, outcome.counts.num_uncompared) == (6, 6, 6)
    assert not outcome.is_equal()


def test_windows_without_a_decision_before_a_restart_of_the_job_are_no_difference(tmp_path: Path) -> None:
    with JobRecording(tmp_path / "job.dxc", ONE_NODE) as recording:
        for window in range(6):
            recording.state(window, is_seen=window < 4)  # the arbitrator was away, until the job had started again
        recording.next_generation(msgspec.structs.replace(ONE_NODE, generation=1))
        for window in range(6):
            recording.state(window)
    outcome = into_arbitrator(recording.path)
    counts = outcome.counts
    assert (counts.num_compared, counts.num_equal, counts.num_outside) == (10, 10, 2)
    assert outcome.is_equal()


def test_a_learned_policy_is_replayed_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.safetensors"
    file.write_bytes(learned.policy_file("deltas", favour=(2,), policy="mine").to_bytes())
    policy = LearnedPolicy(PolicyFile.from_bytes(file.read_bytes()), version=3)
    job = examples.job({"node-a": (0, 1)}, policy="mine")
    with JobRecording(tmp_path / "job.dxc", job, policy) as recording:
        for window in range(6):
            recording.state(window)
    outcome = replay(recording.path, "arbitrator", policy_files=(file,))
    assert (outcome.counts.num_compared, outcome.bytes_equal) == (6, True)
    with pytest.raises(ReplayError, match=r"version 3 of policy 'mine' decided here, but its file .* is not given"):
        into_arbitrator(recording.path)


def test_a_damaged_capture_is_an_error_and_a_cut_off_one_is_replayed(tmp_path: Path) -> None:
    data = bytearray(DEMO.read_bytes())
    cut = tmp_path / "cut.dxc"
    cut.write_bytes(data[:-40])
    outcome = into_arbitrator(cut)
    assert outcome.cut_off
    assert (outcome.counts.num_compared, outcome.bytes_equal) == (30, True)
    data[len(data) // 2] ^= 1
    damaged = tmp_path / "damaged.dxc"
    damaged.write_bytes(data)
    with pytest.raises(CaptureError, match="at byte"):
        into_arbitrator(damaged)


def test_a_capture_without_actions_cannot_be_compared(tmp_path: Path) -> None:
    for missing, reason in ((ACTIONS, "no action of the job"), (JOBS, "no specification")):
        left = (one for one in records(DEMO) if one.stream != missing.name)
        with pytest.raises(ReplayError, match=reason):
            into_arbitrator(written(DEMO, tmp_path / "part.dxc", left))


# --- differences ---------------------------------------------------------------------------------------------------


def test_an_arbitrator_that_stops_deciding_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Proportional.decide

    def fails(self: Proportional, job: Job, window: int, *observed: Any) -> Any:
        if window >= 5:
            raise ValueError("made to fail")
        return decide(self, job, window, *observed)

    monkeypatch.setattr(Proportional, "decide", fails)
    outcome = replay(DEMO, "arbitrator")
    assert outcome.counts.num_different == 25


def test_other_weights_give_other_rewards_and_the_term_is_listed() -> None:
    outcome = replay(DEMO, "reward", reward=RewardSettings(beta=0.2))
    first = outcome.counts.differences[0]
    assert (first.kind, first.window) == ("reward", 0)
    assert "ranks[0].terms.iteration_time" in first.fields
    assert "ranks[0].terms.accuracy" not in first.fields


@pytest.mark.parametrize("num_dropped", [10, 13])
@pytest.mark.parametrize("into", ["collector", "reward"])
def test_a_capture_that_begins_in_the_middle_of_a_window_is_no_difference(
    tmp_path: Path, into: ReplayTarget, num_dropped: int
) -> None:
    dropped = [one for one in records(DEMO) if one.stream == FEED.name][:num_dropped]
    kept = (one for one in records(DEMO) if one not in dropped)
    outcome = replay(written(DEMO, tmp_path / "cut.dxc", kept), into)
    assert outcome.bytes_equal
    assert outcome.counts.num_compared >= 26


def test_an_output_recorded_twice_is_no_difference(tmp_path: Path) -> None:
    found = list(records(DEMO))
    newest = max(record.sequence for record in found if record.stream == FEED.name)
    again = next(record for record in found if Matching("reward", 3)(record))._replace(sequence=newest + 1)
    outcome = replay(written(DEMO, tmp_path / "twice.dxc", [*found, again]), "reward")
    assert (outcome.counts.num_repeated, outcome.bytes_equal) == (1, True)


def test_windows_that_the_recorded_arbitrator_left_undecided_are_a_difference(tmp_path: Path) -> None:
    late = [one for one in records(DEMO) if one.stream == ACTIONS.name][20:]
    decided = (one for one in records(DEMO) if one not in late)
    outcome = into_arbitrator(written(DEMO, tmp_path / "undecided.dxc", decided))
    counts = outcome.counts
    assert (counts.num_equal, counts.num_outside, counts.num_different) == (20, 2, 8)
    assert not outcome.is_equal()


def test_the_state_of_a_dropped_window_is_not_compared(tmp_path: Path) -> None:
    outcome = replay(without(DEMO, tmp_path / "shed.dxc", Matching("window", 11)), "collector")
    assert (outcome.counts.num_compared, outcome.counts.num_uncompared) == (58, 1)
    assert outcome.bytes_equal
    assert not outcome.is_equal()


def test_a_changed_feature_is_listed_by_its_name(tmp_path: Path) -> None:
    def change(record: Record) -> Record:
        if not Matching("state", 5)(record):
            return record
        payload = bytearray(record.payload)
        payload[120] ^= 0x40
        return record._replace(payload=bytes(payload))

    outcome = replay(changed(DEMO, tmp_path / "other.dxc", change), "collector")
    first = outcome.counts.differences[0]
    assert (first.kind, first.window) == ("state", 5)
    assert [path[:5] for path in first.fields] == ["rank "]


def test_close_numbers_agree_and_decisions_must_be_equal() -> None:
    near = examples.state(throughput=(1000.0, 2000.0))
    far = examples.state(throughput=(1000.0004, 2000.0))
    assert near != far
    other = examples.state(throughput=(1010.0, 2000.0))
    assert agree(near, far)
    assert not agree(near, other)
    assert agree(examples.action(carry=b"a", hash=b"b"), examples.action(carry=b"c", hash=b"d"))
    assert not agree(examples.action(), examples.action(local_batch_sizes=(128, 128, 128, 129)))
    assert not agree(examples.action(), "cannot be decoded")
