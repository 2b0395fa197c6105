"""Arithmetic of a step: gradient noise, learning rate, clock."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from dynamix.schemas.messages import GradientNoise
from dynamix.trainer.data.plan import Counts
from dynamix.trainer.gradient import clock as clock_module
from dynamix.trainer.gradient.clock import Clock, DeviceClock, StepTimes
from dynamix.trainer.gradient.learning_rate import correct_second_moments, scale_every_step
from dynamix.trainer.gradient.noise import NoiseAverage, NoiseSums, is_measured, window_moments

DIMENSIONS = 50
MEAN = 0.2
"""Each coordinate: |G_true|^2 = 50 * 0.04 = 2."""
SIGMA = 1.5
"""Each coordinate: S = 50 * 2.25 = 112.5."""


def _rank_sums(steps: list[Counts]) -> list[NoiseSums]:
    """Sums of all ranks over steps whose per-sample gradients are Gaussian: N(MEAN, SIGMA^2) in each coordinate."""
    generator = np.random.default_rng(1)
    sums = [NoiseSums() for _ in steps[0].values]
    for counts in steps:
        local = [
            MEAN + SIGMA / math.sqrt(count) * generator.standard_normal(DIMENSIONS) if count else np.zeros(DIMENSIONS)
            for count in counts.values
        ]
        mean = sum(count / counts.total * gradient for count, gradient in zip(counts.values, local, strict=True))
        for rank, gradient in enumerate(local):
            sums[rank].add_step(counts, rank, float(gradient @ gradient), float(mean @ mean))
    return sums


SIZES = [(32, 32, 32, 32), (8, 24, 64, 32), (2, 10, 100, 16), (1, 1, 1, 125), (5, 0, 3, 120), (0, 64, 0, 64)]
CHANGING = [(1, 1, 1, 125), (40, 3, 0, 9), (16, 16, 16, 16)]


@pytest.mark.parametrize("sizes", [*([each] * 6000 for each in SIZES), CHANGING * 3000])
def test_the_noise_scale_is_unbiased_for_unequal_batches_and_such_that_change(sizes: list[tuple[int, ...]]) -> None:
    moments = window_moments(_rank_sums([Counts(each) for each in sizes]))
    assert moments is not None
    assert moments.trace == pytest.approx(DIMENSIONS * SIGMA**2, rel=0.02)
    assert moments.squared_norm == pytest.approx(DIMENSIONS * MEAN**2, rel=0.02)
    assert moments.trace / moments.squared_norm == pytest.approx(56.25, rel=0.02)


def test_a_norm_that_is_not_finite_leaves_out_the_step_on_all_ranks_or_the_window_where_one_rank_alone_has_it() -> None:
    counts, kept = Counts([4, 4]), [(3.0, 2.0), (5.0, 4.0)]
    sums = [[NoiseSums(), NoiseSums()] for _ in range(3)]
    for rank in (0, 1):
        for one, bad in zip(sums, ([], [(1.0, math.nan)], [(math.inf if rank else 1.0, 1.0)]), strict=True):
            for local, reduced in [*kept, *bad]:
                one[rank].add_step(counts, rank, local, reduced)
    expected, everywhere, alone = map(window_moments, sums)
    assert expected is not None
    assert everywhere == expected
    assert alone is None


def test_one_active_rank_says_nothing_about_noise() -> None:
    sums = [NoiseSums(), NoiseSums()]
    for rank, part in enumerate(sums):
        part.add_step(Counts([0, 8]), rank, 1.0, 1.0)
    assert window_moments(sums) is None
    average = NoiseAverage()
    average.observe_window(None)
    assert average.value is None


@pytest.mark.parametrize(("window", "share"), [(6, 0.76), (10, 0.75), (20, 0.75), (37, 0.75), (200, 0.95)])
def test_a_growing_noise_scale_is_a_quarter_too_low_at_first_and_nine_windows_late_later(
    window: int, share: float
) -> None:
    average = NoiseAverage()
    for number in range(1, window + 1):  # B_noise = 100 number
        average.observe_window(GradientNoise(trace=100.0, squared_norm=1 / number))
    assert average.value is not None
    assert average.value.trace / average.value.squared_norm == pytest.approx(share * 100 * window, rel=0.01)


def test_the_first_steps_are_all_measured_and_then_one_of_some() -> None:
    assert [step for step in range(42) if is_measured(step, 10)] == [*range(20), 20, 30, 40]
    assert all(is_measured(step, 1) for step in range(42))


# --- the learning rate ---


def _one_parameter() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.ones_like(parameter)
    return parameter


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_rule_does_not_compound_with_a_scheduler(as_tensor: bool) -> None:
    parameter = _one_parameter()
    rate = torch.tensor(0.1, dtype=torch.float64) if as_tensor else 0.1
    optimizer = torch.optim.SGD([parameter], lr=rate)
    ratios = iter([1.0, 4.0, 9.0, 0.25])
    handles = scale_every_step(optimizer, lambda: math.sqrt(next(ratios)))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    seen, taken = [], []
    for _ in range(4):
        before = parameter.item()
        optimizer.step()
        taken.append(before - parameter.item())
        seen.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step()
    assert seen == pytest.approx([0.1, 0.05, 0.025, 0.0125], rel=1e-12)
    assert taken == pytest.approx([0.1, 2 * 0.05, 3 * 0.025, 0.5 * 0.0125], rel=1e-12)

    for handle in handles:
        handle.remove()
    before = parameter.item()
    optimizer.step()
    assert before - parameter.item() == pytest.approx(0.00625, rel=1e-12)


def test_every_group_keeps_its_own_rate_also_after_a_step_that_raises() -> None:
    first, second = _one_parameter(), _one_parameter()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.01}])
    scale_every_step(optimizer, lambda: 3.0)

    def failing() -> float:
        raise RuntimeError("the closure failed")

    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(failing)
    optimizer.step()
    assert (first.item(), second.item()) == pytest.approx((-3.0, -0.03))
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.01]


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"weight_decay": 0.1}])
def test_second_moments_of_a_part_of_the_samples_have_the_noise_of_all(options: dict[str, Any]) -> None:
    """Gradients 2 and 0 in turn: the moment is 1 of the mean and a quarter of the variance 1, then that of any step."""
    weights = torch.nn.Parameter(torch.zeros(3))
    optimizer, shares = torch.optim.AdamW([weights, _one_parameter()], betas=(0.999, 0.9), **options), [0.25]
    correct_second_moments(optimizer, lambda: shares[0])

    def moment(num_steps: int) -> float:
        for step in range(num_steps):
            weights.grad = torch.full_like(weights, 2.0 * (step % 2))
            optimizer.step()
        return float(optimizer.state[weights]["exp_avg_sq"].mean())

    assert (moment(1000) + moment(999)) / 2 == pytest.approx(1.25, rel=0.01)
    shares[0] = 1.0
    assert (moment(1000) + moment(999)) / 2 == pytest.approx(2.0, rel=0.01)


# --- the clock of a step ---


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
