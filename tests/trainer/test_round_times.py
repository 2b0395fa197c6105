"""What ranks tell each other of their speed where a round of local steps ends: that of the whole round."""

from itertools import cycle
from typing import Any

import pytest
import torch
from tests.support.ranks import run_ranks
from tests.support.whole_numbers import Whole, attach, distributed, train_step

from dynamix.schemas.messages.allocation import Exchange
from dynamix.trainer.local_steps.round_times import RoundTimes, mean_counts

SLICED = (0.001, 0.001, 0.001, 0.005)
"""Seconds per sample of a rank that lost its processor in every fourth step."""


def test_the_time_of_a_round_is_that_of_all_its_samples() -> None:
    times = RoundTimes()
    assert times.seconds_per_sample == 0.0
    for seconds, count in ((0.002, 30), (0.0, 7), (0.010, 10), (0.5, 0)):
        times.add(seconds, count)
    assert times.seconds_per_sample == pytest.approx(0.16 / 40)


def test_counts_of_a_round_are_those_of_its_mean_step() -> None:
    assert mean_counts((48, 30, 7, 0), 4) == (12, 8, 2, 0)


def _told(rank: int) -> tuple[tuple[int, ...], list[float], list[tuple[int, ...]]]:
    """Sizes after 20 local steps of ranks that are equally fast over a round, and what all were told of times."""
    model = distributed()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    options: dict[str, Any] = {"exchange": Exchange(every=4), "policy_options": {"track": 1}}
    with attach(model, optimizer, Whole(), local_batch_size=8, **options) as session:
        steps = cycle(SLICED) if rank else cycle([0.002])
        session._meter.clock.seconds_per_sample = lambda: next(steps)  # type: ignore[method-assign]
        times, counts = [], []
        observe = session._run.fast_loop.observe_times

        def listen(seconds: Any, step: int, of: tuple[int, ...] = ()) -> None:
            times.extend(seconds)
            counts.append(of)
            observe(seconds, step, of)

        session._run.fast_loop.observe_times = listen  # type: ignore[method-assign]
        for batch in session.loader:
            train_step(session, model, optimizer, batch)
            if session.step_index == 20:
                break
        return session.local_batch_sizes, times, counts


def test_ranks_that_are_alike_over_a_round_stay_alike_whatever_its_last_step_took() -> None:
    for sizes, times, counts in run_ranks(_told, 2):
        assert times == pytest.approx([0.002] * 10)
        assert counts == [(8, 8)] * 5
        assert sizes == (8, 8)
