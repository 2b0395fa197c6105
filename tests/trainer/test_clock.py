import time

import pytest

from dynamix.trainer import clock as clock_module
from dynamix.trainer.clock import HostClock, StepTimes


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock's time, to be set by hand."""
    moment = [100.0]
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: moment[0])
    return moment


def _step(clock: HostClock, now: list[float], *moments: tuple[float, str]) -> None:
    for seconds, name in moments:
        now[0] += seconds
        getattr(clock, name)()


def test_the_parts_of_a_step_are_its_whole(now: list[float]) -> None:
    clock = HostClock()
    _step(
        clock,
        now,
        (0, "asked"),
        (1, "handed_out"),
        (2, "reduced"),  # an early bucket comes back while later ones are still computed
        (2, "gradient_ready"),
        (8, "reduced"),
        (16, "before_update"),
        (16, "end"),
    )
    assert clock.last == StepTimes(data_s=1, compute_s=4, sync_s=8, update_s=32)
    assert clock.last.step_s == 45
    assert clock.take() == [StepTimes(1, 4, 8, 32)]
    assert clock.take() == []
    assert clock.last == StepTimes(1, 4, 8, 32)


def test_what_lies_between_two_steps_counts_for_neither(now: list[float]) -> None:
    clock = HostClock()
    _step(clock, now, (0, "asked"), (1, "handed_out"), (1, "gradient_ready"), (1, "reduced"), (1, "end"))
    _step(clock, now, (500, "asked"), (1, "handed_out"), (1, "gradient_ready"), (1, "reduced"), (1, "end"))
    assert clock.take() == [StepTimes(1, 1, 1, 1)] * 2


def test_our_own_work_after_a_step_is_charged_to_the_next(now: list[float]) -> None:
    clock = HostClock()
    _step(clock, now, (0, "asked"), (1, "handed_out"), (1, "gradient_ready"), (1, "reduced"), (1, "end"))
    clock.charge(0.25)
    _step(clock, now, (0, "asked"), (1, "handed_out"), (1, "gradient_ready"), (1, "reduced"), (1, "end"))
    assert [step.update_s for step in clock.take()] == [1, 1.25]


def test_without_a_bucket_computing_ends_where_the_optimizer_begins(now: list[float]) -> None:
    clock = HostClock()
    _step(clock, now, (0, "asked"), (1, "handed_out"), (4, "before_update"), (2, "end"))
    assert clock.take() == [StepTimes(1, 4, 0, 2)]
    _step(clock, now, (0, "asked"), (1, "handed_out"), (4, "end"))
    assert clock.take() == [StepTimes(1, 4, 0, 0)]


def test_the_monotonic_clock_is_read() -> None:
    clock = HostClock()
    before = time.perf_counter()
    clock.asked()
    clock.handed_out()
    clock.end()
    assert clock.last is not None
    assert 0 <= clock.last.step_s <= time.perf_counter() - before
