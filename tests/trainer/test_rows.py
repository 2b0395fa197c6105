import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import examples
from tests.support.rows import row

from dynamix.schemas.codec import decode, encode
from dynamix.schemas.messages import GradientNoise, Report, SocketCounters
from dynamix.schemas.subjects import subject_of
from dynamix.trainer.exchange.codec import CodedSquares
from dynamix.trainer.measurement.clock import StepTimes
from dynamix.trainer.measurement.meter import Row, job_totals, rank_row
from dynamix.trainer.steering.collectives import LENGTH_BYTES, ROW_BYTES

COUNT = st.integers(0, 2**53 - 1)
SECONDS = st.floats(0, 1e6)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SOCKETS = st.builds(SocketCounters, tx_bytes=COUNT, rx_bytes=COUNT, retransmits=COUNT, srtt_us=SECONDS | st.none())


@given(SOCKETS | st.none(), COUNT, FINITE, st.floats(0, 1e9) | st.none(), st.tuples(COUNT, COUNT) | st.none())
def test_a_row_survives_the_gather_whole(
    sockets: SocketCounters | None,
    num_samples: int,
    loss_sum: float,
    num_correct: float | None,
    device: tuple[int, int] | None,
) -> None:
    sent = row(sockets=sockets, num_samples=num_samples, loss_sum=loss_sum, num_correct=num_correct, device=device)
    packed = msgspec.msgpack.encode(sent)
    assert len(packed) + LENGTH_BYTES <= ROW_BYTES
    assert msgspec.msgpack.decode(packed, type=Row) == sent


@pytest.mark.parametrize("loss_sum", [None, math.nan, math.inf, -math.inf])
def test_a_loss_that_is_missing_or_diverged_is_unknown_and_still_makes_a_message(loss_sum: float | None) -> None:
    unknown = row(loss_sum=loss_sum)
    assert unknown.loss_sum is None
    assert job_totals([unknown, row()], window=0, num_steps=2, global_batch_size=128).loss_sum is None
    message = examples.report(
        rows=(rank_row(1, unknown, None, local_batch_size=64, pending_local_batch_size=64),),
        totals=job_totals([unknown, unknown], window=0, num_steps=2, global_batch_size=128),
    )
    assert decode(Report, subject_of(message), encode(message)) == message


def test_totals_are_sums_of_the_rows_and_the_longest_time() -> None:
    slow = row(times=StepTimes(0.3, 0.75, 3.0, 0.1))
    totals = job_totals([row(), slow], window=4, num_steps=2, global_batch_size=64)
    assert (totals.window, totals.num_steps, totals.global_batch_size) == (4, 2, 64)
    assert (totals.num_samples, totals.loss_sum, totals.num_correct) == (200, 100.0, 150.0)
    assert totals.time_s == pytest.approx(4.15)
    uncounted = job_totals([row(), row(num_correct=None)], window=0, num_steps=2, global_batch_size=64)
    assert uncounted.num_correct is None


def test_what_published_rules_for_exchanges_need_is_in_the_totals() -> None:
    rows = [
        row(learning_rate=0.25, coded=CodedSquares(3.0, 2.0)),
        row(learning_rate=0.5, coded=CodedSquares(1.0, 1.0)),
    ]
    noise = GradientNoise(trace=120.0, squared_norm=0.75)
    totals = job_totals(rows, window=0, num_steps=2, global_batch_size=80, noise=noise)
    assert (totals.learning_rate, totals.gradient_norm, totals.coding_gain) == (0.25, 1.5, 0.75)
    drowned = noise.__class__(trace=1.0, squared_norm=-1.0)
    plain = job_totals(
        [row(learning_rate=None, coded=CodedSquares())], window=0, num_steps=2, global_batch_size=80, noise=drowned
    )
    assert (plain.learning_rate, plain.gradient_norm, plain.coding_gain) == (None, None, None)
