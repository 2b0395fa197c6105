"""A recorded job decided by another policy than its own."""

import pytest
from tests.support.recordings import DEMO

from dynamix.recording.capture import records
from dynamix.recording.decisions import OtherPolicy
from dynamix.recording.playback import ReplayError
from dynamix.recording.replay import ReplayRequest, replay
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Job
from dynamix.schemas.streams import ACTIONS, JOBS


async def test_asking_the_recorded_policy_gives_the_recorded_decisions() -> None:
    outcome = await replay(ReplayRequest(DEMO, "arbitrator", other=OtherPolicy("proportional", {})))
    assert outcome.what_if is not None
    assert (outcome.what_if.num_windows, outcome.what_if.num_windows_different) == (30, 0)


async def test_asking_another_policy_gives_its_decisions() -> None:
    initial = next(decode(Job, r.subject, r.payload) for r in records(DEMO) if r.stream == JOBS.name)
    outcome = await replay(ReplayRequest(DEMO, "arbitrator", other=OtherPolicy("static", {})))
    asked = outcome.what_if
    assert asked is not None
    assert {row.other for row in asked.windows} == {initial.initial_local_batch_sizes}
    recorded = [decode(Action, r.subject, r.payload) for r in records(DEMO) if r.stream == ACTIONS.name]
    assert [row.recorded for row in asked.windows] == [action.local_batch_sizes for action in recorded]
    assert asked.mean_difference == pytest.approx(
        sum(abs(a - b) for row in asked.windows for a, b in zip(row.recorded, row.other, strict=True)) / (30 * 4)
    )


async def test_an_unknown_policy_or_option_is_an_error_with_a_reason() -> None:
    with pytest.raises(ReplayError, match="no policy is called 'magic'"):
        await replay(ReplayRequest(DEMO, "arbitrator", other=OtherPolicy("magic", {})))
    with pytest.raises(ReplayError, match="has no option 'speed'"):
        await replay(ReplayRequest(DEMO, "arbitrator", other=OtherPolicy("rule", {"speed": 1.0})))
