"""Compute times that travel with the gradient, and the clock that takes them."""

import pytest
import torch

from dynamix.trainer.gradient.time_slots import TimeSlots
from dynamix.trainer.measurement.clock import HostClock


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float64, 1e-15), (torch.float32, 1e-7), (torch.float16, 1e-3), (torch.bfloat16, 4e-3)],
)
@pytest.mark.parametrize("seconds", [1e-6, 0.037, 50.0])
def test_slots_come_back_with_the_gradient_in_any_format(dtype: torch.dtype, precision: float, seconds: float) -> None:
    slots = TimeSlots(rank=1, world_size=3)
    bucket = torch.tensor([1.0, -2.0], dtype=dtype)
    sent = slots.extend(bucket, 0.5, seconds)
    assert sent.numel() == 2 + 3
    sent[0] += 7.0  # as another rank's gradient does
    assert bucket.tolist() == [1.0, -2.0]
    assert slots.receive().tolist() == [7.5, -1.0]
    assert slots.take_seconds() == [0.0, pytest.approx(seconds, rel=precision), 0.0]
    assert slots.take_seconds() is None


def test_a_rank_without_samples_sends_zeros_whatever_its_dummy_batch_did() -> None:
    slots = TimeSlots(rank=0, world_size=2)
    slots.extend(torch.ones(3), 1.0, 1e9)
    assert slots.extend(torch.full((3,), torch.nan), 0.0, 0.0).tolist() == [0.0] * 5
    assert torch.isfinite(slots.extend(torch.ones(1, dtype=torch.float16), 1.0, 1e9)).all()


def test_the_clock_tells_seconds_per_sample_when_the_gradient_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = [5.0]
    monkeypatch.setattr("dynamix.trainer.measurement.clock.time.perf_counter", lambda: moment[0])
    clock = HostClock()
    for num_samples, expected in ((8, 0.25), (0, 0.0)):
        clock.asked()
        clock.handed_out(num_samples)
        assert clock.seconds_per_sample() == 0.0
        moment[0] += 2
        clock.gradient_ready()
        moment[0] += 7
        assert clock.seconds_per_sample() == expected
        clock.end()
