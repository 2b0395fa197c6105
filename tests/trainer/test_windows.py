"""Where windows end: by themselves, and in a whole small job on real gloo ranks."""

from itertools import accumulate, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, begin_job, offer, train_step

from dynamix.schemas.messages import Applied, Message, Report
from dynamix.trainer.job import options
from dynamix.trainer.steering import run
from dynamix.trainer.steering.run import FIRST_WINDOWS, Windows

NUM_STEPS = 600


def starts_of(windows: Windows, step_time_s: float, num_steps: int) -> list[int]:
    """The starts of windows in a run whose steps all take as long."""
    starts = [0]
    for step in range(1, num_steps):
        if windows.is_start(step):
            windows.measured(windows.window_of(step - 1), step_time_s)
            starts.append(step)
    return starts


def test_windows_whose_length_a_script_chose_are_never_longer() -> None:
    assert starts_of(Windows(7, 2), 1e-6, 71) == list(range(0, 71, 7))


def test_windows_of_short_steps_last_a_second_after_the_first_ones() -> None:
    starts = starts_of(Windows(10, 2, 1.0), 0.026, 300)
    assert starts[: FIRST_WINDOWS + 1] == list(range(0, 10 * FIRST_WINDOWS + 1, 10))
    assert [after - before for before, after in pairwise(starts[FIRST_WINDOWS:])] == [40] * 5  # 0.26 s, 1.04 s
    assert starts_of(Windows(10, 2, 1.0), 0.1, 101) == list(range(0, 101, 10))  # a second already


@given(st.integers(1, 12), st.integers(2, 40), st.integers(0, 2**32))
def test_a_rank_that_knows_a_window_sooner_than_others_asks_for_nothing_that_they_do_not(
    window_steps: int, margin_steps: int, seed: int
) -> None:
    """A checkpoint completes what was posted on one rank alone; all must still enter the same collectives."""
    chance = Random(seed)
    step_times_s = [10.0 ** chance.uniform(-4, 0) for _ in range(8)]
    ranks = [Windows(window_steps, margin_steps, 1.0) for _ in range(2)]
    ended: list[int | None] = [None, None]

    def complete(rank: int) -> None:
        window, ended[rank] = ended[rank], None
        if window is not None:
            time_s = step_times_s[window % len(step_times_s)]
            ranks[rank].measured(window, time_s, 4 if window % 3 == 0 else 1)

    for step in range(1, 600):
        asked = [(windows.is_start(step), windows.is_start(step - 1 + margin_steps)) for windows in ranks]
        assert asked[0] == asked[1]
        for rank, windows in enumerate(ranks):
            complete(rank)
            if asked[rank][0]:
                ended[rank] = windows.window_of(step - 1)
            if asked[rank][1]:
                assert windows.window_of(step - 1 + margin_steps) > windows.window_of(step - 1)
        if chance.random() < 0.5:
            complete(0)


def _train_by_default(rank: int, num_workers: int) -> list[Message]:
    """Short steps, and windows that the script says nothing of."""
    published: list[Message] = []
    options.MIN_WINDOW_S, run.MOST_STRETCH = 60.0, 3  # no machine is too slow for windows to be stretched
    session, model, optimizer = begin_job(Numbered(NUM_STEPS * 16), num_workers=num_workers)
    session._transport.publish = published.append  # type: ignore[method-assign]
    for batch in session.loader:
        if session.window in (3, 9):
            offer(session, (4 + session.window, 12 - session.window))
        train_step(session, model, optimizer, batch)
        if rank == 0 and session.step_index % 7 == 0:
            session.state_dict()
    session.close()
    return published


@pytest.mark.parametrize("num_workers", [0, 6])
def test_ranks_with_short_steps_end_the_same_longer_windows_and_report_how_long_they_were(num_workers: int) -> None:
    published = run_ranks(_train_by_default, 2, num_workers)
    window_steps = 10 if num_workers == 0 else 20  # 14 batches are drawn ahead
    reports = [message for message in published[0] if isinstance(message, Report)]
    assert [report.window for report in reports] == list(range(len(reports)))
    ends = list(accumulate(report.totals.num_steps for report in reports))
    used = accumulate(report.totals.num_samples for report in reports)
    assert [report.samples_seen for report in reports] == list(used)
    assert all(report.totals.num_steps == window_steps * report.stretch for report in reports)
    assert {report.stretch for report in reports[:FIRST_WINDOWS]} == {1}
    assert {report.stretch for report in reports[FIRST_WINDOWS + 1 :]} == {3}
    assert len(reports) > FIRST_WINDOWS + 1
    for report in reports:
        assert sum(row.num_samples for row in report.rows) == report.totals.num_samples
        assert report.totals.num_samples == 16 * report.totals.num_steps
    applied = [message for message in published[0] if isinstance(message, Applied)]
    assert {receipt.decided_window for receipt in applied} == {3, 9}
    for receipt in applied:
        assert receipt.effective_step in ends
        assert ends.index(receipt.effective_step) == receipt.effective_window - 1
