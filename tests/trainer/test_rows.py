import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import examples
from tests.support.rows import row

from dynamix.schemas.codec import decode, encode
from dynamix.schemas.messages import GradientNoise, NetworkMetrics, Report
from dynamix.schemas.subjects import subject_of
from dynamix.trainer.exchange.codec import CodedSquares
from dynamix.trainer.measurement.meter import ROWS, Gains, job_totals
from dynamix.trainer.steering.collectives import LENGTH_BYTES, ROW_BYTES

COUNT = st.integers(0, 2**53 - 1)
SOCKETS = st.builds(NetworkMetrics, tx_bytes=COUNT, rx_bytes=COUNT, retransmits=COUNT, srtt_us=st.floats(0, 1e6))


@given(SOCKETS | st.none(), COUNT, st.floats(allow_nan=False, allow_infinity=False), COUNT | st.none())
def test_a_row_survives_the_gather_whole(
    sockets: NetworkMetrics | None, num_samples: int, loss_sum: float, memory: int | None
) -> None:
    sent = row(sockets=sockets, num_samples=num_samples, loss_sum=loss_sum, device_memory_bytes=memory)
    packed = msgspec.msgpack.encode(sent)
    assert len(packed) + LENGTH_BYTES <= ROW_BYTES
    assert ROWS.decode(packed) == sent


@pytest.mark.parametrize("loss_sum", [None, math.nan, math.inf, -math.inf])
def test_a_loss_that_is_missing_or_diverged_is_unknown_and_still_makes_a_message(loss_sum: float | None) -> None:
    unknown = row(loss_sum=loss_sum)
    assert unknown.rank.loss_sum is None
    totals = job_totals([unknown, row()], window=0, num_steps=2, global_batch_size=128)
    assert totals.loss_sum is None
    message = examples.report(rows=(unknown.rank,), totals=totals)
    assert decode(Report, subject_of(message), encode(message)) == message


def test_totals_are_sums_of_the_rows_and_the_longest_time() -> None:
    rows = [
        row(learning_rate=0.25, coded=CodedSquares(3.0, 2.0)),
        row(learning_rate=0.5, coded=CodedSquares(1.0, 1.0), sync_time_s=3.0),
    ]
    noise = GradientNoise(trace=120.0, squared_norm=0.75)
    totals = job_totals(rows, window=4, num_steps=2, global_batch_size=80, noise=noise)
    assert (totals.window, totals.num_steps, totals.global_batch_size) == (4, 2, 80)
    assert (totals.num_samples, totals.loss_sum, totals.num_correct) == (200, 100.0, 150.0)
    assert totals.time_s == pytest.approx(4.15)
    assert (totals.learning_rate, totals.gradient_norm, totals.coding_gain) == (0.25, 1.5, 0.75)


def test_a_job_gains_what_its_slow_rank_would_have_taken_with_equal_sizes_or_at_the_scripts_batch() -> None:
    """Ranks of 1 and 3 ms a sample, the fixed cost that of 10 samples, 0.1 s of other times in each of ten steps."""
    rows = [
        row(rank=rank, num_samples=10 * size, compute_time_s=10 * (10 + size) * cost_s)
        for rank, (size, cost_s) in enumerate([(80, 1e-3), (20, 3e-3)])
    ]
    other_s = rows[0].rank.data_time_s + rows[0].rank.sync_time_s + rows[0].rank.update_time_s
    totals = job_totals(rows, window=0, num_steps=10, global_batch_size=100)
    gains = Gains()
    assert gains.summary(0.0) is None
    for is_other in (False, True):
        gains.observe_window(rows, totals, [10, 10], 50, is_other=is_other)
    found = gains.summary(0.5)
    assert found is not None
    assert (found.num_steps, found.num_samples, found.own_s) == (20, 2000, 0.5)
    assert found.time_s == pytest.approx(2 * (0.9 + other_s))
    assert found.equal_sizes_s == pytest.approx(2 * (1.8 + other_s))
    assert found.script_batch_s == pytest.approx(1.8 + other_s + 2 * (1.05 + other_s))
    assert found.gain == pytest.approx((found.script_batch_s - 0.5) / found.time_s)


def test_what_one_rank_does_not_know_is_unknown_of_all() -> None:
    rows = [row(coded=CodedSquares(), learning_rate=None), row(num_correct=None, coded=CodedSquares())]
    drowned = GradientNoise(trace=1.0, squared_norm=-1.0)
    totals = job_totals(rows, window=0, num_steps=2, global_batch_size=80, noise=drowned)
    assert (totals.num_correct, totals.learning_rate) == (None, None)
    assert (totals.gradient_norm, totals.coding_gain) == (None, None)
