import pytest

from dynamix.trainer.gradient import clock as clock_module
from dynamix.trainer.gradient.clock import Clock, DeviceClock, StepTimes


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock's time, to be set by hand."""
    moment = [100.0]
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: moment[0])
    return moment


def _step(clock: Clock, now: list[float], *moments: tuple[float, str]) -> None:
    for seconds, name in moments:
        now[0] += seconds
        getattr(clock, name)()


def test_the_parts_of_a_step_are_its_whole(now: list[float]) -> None:
    clock = Clock()
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
    assert clock.take_times() == [StepTimes(1, 4, 8, 32)]
    assert clock.take_times() == []
    assert clock.last == StepTimes(1, 4, 8, 32)


def test_what_lies_between_two_steps_counts_for_neither(now: list[float]) -> None:
    clock = Clock()
    _step(clock, now, (0, "asked"), (1, "handed_out"), (1, "gradient_ready"), (1, "reduced"), (1, "end"))
    _step(clock, now, (500, "asked"), (1, "handed_out"), (1, "gradient_ready"), (1, "reduced"), (1, "end"))
    assert clock.take_times() == [StepTimes(1, 1, 1, 1)] * 2


def test_the_end_of_a_round_of_local_steps_is_waiting_for_others(now: list[float]) -> None:
    clock = Clock()
    _step(clock, now, (0, "asked"), (1, "handed_out"), (2, "gradient_ready"), (0, "reduced"), (4, "before_update"))
    with clock.averaging():
        now[0] += 8
    _step(clock, now, (16, "end"))
    _step(clock, now, (0, "asked"), (1, "handed_out"), (1, "gradient_ready"), (1, "reduced"), (1, "end"))
    assert clock.take_times() == [StepTimes(data_s=1, compute_s=2, sync_s=8, update_s=20), StepTimes(1, 1, 1, 1)]


class _Event:
    """Stands in for a CUDA event: recorded at the host's moment, done when the device has come so far."""

    host_s = 0.0
    device_s = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_s = -1.0

    def record(self) -> None:
        self.at_s = _Event.host_s

    def query(self) -> bool:
        return self.at_s <= _Event.device_s

    def synchronize(self) -> None:
        _Event.device_s = max(_Event.device_s, self.at_s)

    def elapsed_time(self, later: "_Event") -> float:
        assert later.query(), "not done yet: CUDA raises"
        return 1000 * (later.at_s - self.at_s)


def _device_step(clock: DeviceClock, num_samples: int, compute_s: float) -> float:
    """A step as the host queues it; what the clock tells when the gradient is ready."""
    clock.asked()
    clock.handed_out(num_samples)
    _Event.host_s += compute_s
    clock.gradient_ready()
    told = clock.seconds_per_sample()
    clock.reduced()
    _Event.host_s += 1
    clock.end()
    return told


def test_a_device_tells_its_newest_finished_step_once_and_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module.torch.cuda, "Event", _Event)
    monkeypatch.setattr(_Event, "host_s", 0.0)
    monkeypatch.setattr(_Event, "device_s", -1.0)
    clock = DeviceClock()
    assert _device_step(clock, 4, 2) == 0.0
    assert _device_step(clock, 4, 8) == 0.0  # the device has done nothing yet
    _Event.device_s = 4.0
    assert _device_step(clock, 4, 4) == 2 / 4
    assert _device_step(clock, 2, 6) == 0.0  # told already, and the next ones are not done
    _Event.device_s = 1000.0
    assert _device_step(clock, 4, 1) == 6 / 2  # the newest, not those in between
    assert [step.compute_s for step in clock.take_times()] == [2, 8, 4, 6, 1]
    assert _device_step(clock, 0, 3) == 1 / 4  # known when the window was taken, its events used again since
    assert _device_step(clock, 4, 5) == 0.0  # a step without samples has no time per sample
    assert _device_step(clock, 4, 5) == 5 / 4
