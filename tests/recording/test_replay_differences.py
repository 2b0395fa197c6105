"""What a replay tells of outputs that differ from the recorded ones, and what is no difference."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import examples
from tests.support.recordings import DEMO, Matching, changed, into_arbitrator, without, written

from dynamix.arbitrator.policies.baselines import Proportional
from dynamix.recording.capture import Record, WindowKey, first_generation, records
from dynamix.recording.comparison import agree
from dynamix.recording.replay import ReplayRequest, ReplayTarget, replay
from dynamix.reward.service import RewardSettings
from dynamix.schemas import codec
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Job
from dynamix.schemas.streams import ACTIONS, FEED


async def test_a_changed_action_is_the_first_difference_with_both_sides(tmp_path: Path) -> None:
    def change(record: Record) -> Record:
        if not Matching("action", 7)(record):
            return record
        action = decode(Action, record.subject, record.payload)
        sizes = (action.local_batch_sizes[0] + 1, *action.local_batch_sizes[1:])
        other = msgspec.structs.replace(action, local_batch_sizes=sizes)
        return record._replace(payload=codec.encode(other))

    outcome = await into_arbitrator(changed(DEMO, tmp_path / "other.dxc", change))
    first = outcome.counts.first
    assert first is not None
    assert (first.kind, first.window, first.reason, first.agrees) == ("action", 7, "other bytes", False)
    assert [(pair.field, int(pair.recorded) - int(pair.replayed)) for pair in first.fields if pair.differs] == [
        ("local_batch_sizes[0]", 1)
    ]
    assert outcome.counts.num_different == 1, "what stands behind it is judged by itself"
    assert outcome.counts.num_equal == 29


@pytest.mark.parametrize("offset", [0, -1])
async def test_a_flipped_bit_of_an_action_is_found_wherever_it_is(tmp_path: Path, offset: int) -> None:
    def flip(record: Record) -> Record:
        if not Matching("action", 7)(record):
            return record
        payload = bytearray(record.payload)
        payload[offset] ^= 1
        return record._replace(payload=bytes(payload))

    outcome = await into_arbitrator(changed(DEMO, tmp_path / "flipped.dxc", flip))
    first = outcome.counts.first
    assert first is not None
    assert (first.window, outcome.counts.num_equal) == (7, 29)
    assert first.first_byte == offset % len(next(r.payload for r in records(DEMO) if Matching("action", 7)(r)))
    assert any(pair.differs for pair in first.fields)


async def test_a_missing_action_is_reported_with_its_window(tmp_path: Path) -> None:
    outcome = await into_arbitrator(without(DEMO, tmp_path / "lacking.dxc", Matching("action", 9)))
    first = outcome.counts.first
    assert first is not None
    assert (first.window, first.reason) == (9, "only replayed")
    assert not outcome.decisions_equal


async def test_an_arbitrator_that_stops_deciding_is_a_difference_also_with_until(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decide = Proportional.decide

    def fails(self: Proportional, job: Job, window: int, *observed: Any) -> Any:
        if window >= 5:
            raise ValueError("made to fail")
        return decide(self, job, window, *observed)

    monkeypatch.setattr(Proportional, "decide", fails)
    generation = first_generation(DEMO)
    for until, num_missing in ((None, 25), (WindowKey(generation, 12), 8)):
        outcome = await replay(ReplayRequest(DEMO, "arbitrator", until=until))
        assert not outcome.decisions_equal
        assert outcome.counts.num_different == num_missing


async def test_other_weights_give_other_rewards_and_the_term_is_listed() -> None:
    outcome = await replay(ReplayRequest(DEMO, "reward", reward=RewardSettings(beta=0.2)))
    first = outcome.counts.first
    assert first is not None
    assert (first.kind, first.window) == ("reward", 0)
    differing = {pair.field for pair in first.fields if pair.differs}
    assert "ranks[0].terms.iteration_time" in differing
    assert "ranks[0].terms.accuracy" not in differing


@pytest.mark.parametrize("num_dropped", [10, 13])
@pytest.mark.parametrize("into", ["collector", "reward"])
async def test_a_capture_that_begins_in_the_middle_of_a_window_is_no_difference(
    tmp_path: Path, into: ReplayTarget, num_dropped: int
) -> None:
    feed = [record.sequence for record in records(DEMO) if record.stream == FEED.name]
    dropped = frozenset(feed[:num_dropped])
    cut = changed(
        DEMO,
        tmp_path / "cut.dxc",
        lambda record: None if record.stream == FEED.name and record.sequence in dropped else record,
    )
    outcome = await replay(ReplayRequest(cut, into))
    assert outcome.bytes_equal
    assert outcome.counts.num_compared >= 26


async def test_an_output_recorded_twice_is_no_difference(tmp_path: Path) -> None:
    last = list(records(DEMO))[-1]
    reward = next(record for record in records(DEMO) if Matching("reward", 3)(record))
    newest = max(record.sequence for record in records(DEMO) if record.stream == FEED.name)
    again = reward._replace(sequence=newest + 1, timestamp_ns=last.timestamp_ns)
    outcome = await replay(ReplayRequest(written(DEMO, tmp_path / "twice.dxc", [*records(DEMO), again]), "reward"))
    assert (outcome.counts.num_repeated, outcome.bytes_equal) == (1, True)


async def test_windows_that_the_recorded_arbitrator_left_undecided_are_a_difference(tmp_path: Path) -> None:
    def until_window_19(record: Record) -> Record | None:
        if record.stream != ACTIONS.name:
            return record
        return record if decode(Action, record.subject, record.payload).window < 20 else None

    outcome = await into_arbitrator(changed(DEMO, tmp_path / "undecided.dxc", until_window_19))
    counts = outcome.counts
    assert (counts.num_equal, counts.num_outside, counts.num_different) == (20, 2, 8)
    assert not outcome.is_equal()


async def test_the_state_of_a_dropped_window_is_not_compared(tmp_path: Path) -> None:
    outcome = await replay(ReplayRequest(without(DEMO, tmp_path / "shed.dxc", Matching("window", 11)), "collector"))
    assert (outcome.counts.num_compared, outcome.counts.num_uncompared) == (58, 1)
    assert outcome.bytes_equal
    assert not outcome.is_equal()


async def test_a_changed_feature_is_listed_by_its_name(tmp_path: Path) -> None:
    def change(record: Record) -> Record:
        if not Matching("state", 5)(record):
            return record
        payload = bytearray(record.payload)
        payload[120] ^= 0x40
        return record._replace(payload=bytes(payload))

    outcome = await replay(ReplayRequest(changed(DEMO, tmp_path / "other.dxc", change), "collector"))
    first = outcome.counts.first
    assert first is not None
    assert (first.kind, first.window) == ("state", 5)
    differing = [pair.field for pair in first.fields if pair.differs]
    assert len(differing) == 1
    assert differing[0].startswith("rank ")


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
