import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support import examples

from dynamix.schemas.codec import decode, encode
from dynamix.schemas.messages import GradientNoise, Report, SocketCounters
from dynamix.schemas.subjects import subject_of
from dynamix.trainer.gradient.noise import NoiseSums
from dynamix.trainer.measurement.clock import StepTimes
from dynamix.trainer.measurement.meter import Row, job_totals, make_row, rank_row
from dynamix.trainer.measurement.sockets import ProcessIdentity

COUNT = st.integers(0, 2**53 - 1)
SECONDS = st.floats(0, 1e6)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SOCKETS = st.builds(SocketCounters, tx_bytes=COUNT, rx_bytes=COUNT, retransmits=COUNT, srtt_us=SECONDS | st.none())


def _row(
    *,
    sockets: SocketCounters | None = None,
    num_samples: int = 100,
    loss_sum: float | None = 50.0,
    num_correct: float | None = 75.0,
    accuracy: float | None = None,
    device: tuple[int, int] | None = None,
    times_split: bool = True,
) -> Row:
    return make_row(
        1,
        ProcessIdentity(pid=1234, start_ticks=2**40 + 1, namespace=4026531836, uid=1000),
        num_samples=num_samples,
        loss_sum=loss_sum,
        num_correct=num_correct,
        times=[StepTimes(0.1, 0.5, 0.25, 0.05), StepTimes(0.2, 0.25, 0.5, 0.05)],
        times_split=times_split,
        noise=NoiseSums(2, 1.0, 2.0, 3.0, 4.0),
        sockets=sockets,
        device=device,
        held_out_accuracy=accuracy,
    )


@given(SOCKETS | st.none(), COUNT, FINITE, st.floats(0, 1e9) | st.none(), st.tuples(COUNT, COUNT) | st.none())
def test_a_row_survives_the_gather_whole(
    sockets: SocketCounters | None,
    num_samples: int,
    loss_sum: float,
    num_correct: float | None,
    device: tuple[int, int] | None,
) -> None:
    row = _row(sockets=sockets, num_samples=num_samples, loss_sum=loss_sum, num_correct=num_correct, device=device)
    gathered = Row(*torch.tensor(row, dtype=torch.float64).tolist())
    message = rank_row(3, gathered, gathered, local_batch_size=64, pending_local_batch_size=96)
    assert (message.rank, message.local_rank, message.local_batch_size, message.pending_local_batch_size) == (
        3,
        1,
        64,
        96,
    )
    assert (message.pid, message.pid_start_ticks, message.pid_namespace) == (1234, 2**40 + 1, 4026531836)
    assert (message.num_samples, message.loss_sum, message.num_correct) == (num_samples, loss_sum, num_correct)
    assert message.sockets == message.sockets_before == sockets
    assert (message.device_memory_bytes, message.device_memory_total_bytes) == (device or (None, None))
    assert gathered.noise == NoiseSums(2, 1.0, 2.0, 3.0, 4.0)


@pytest.mark.parametrize("loss_sum", [None, math.nan, math.inf, -math.inf])
def test_a_loss_that_is_missing_or_diverged_is_unknown_and_still_makes_a_message(loss_sum: float | None) -> None:
    row = _row(loss_sum=loss_sum)
    assert math.isnan(row.loss_sum)
    assert job_totals([row, _row()], window=0, num_steps=2, global_batch_size=128).loss_sum is None
    message = examples.report(
        rows=(rank_row(1, row, None, local_batch_size=64, pending_local_batch_size=64),),
        totals=job_totals([row, row], window=0, num_steps=2, global_batch_size=128),
    )
    assert decode(Report, subject_of(message), encode(message)) == message


def test_totals_are_sums_of_the_rows_and_the_longest_time() -> None:
    slow = _row()._replace(sync_time_s=3.0)
    totals = job_totals([_row(), slow], window=4, num_steps=2, global_batch_size=64)
    assert (totals.window, totals.num_steps, totals.global_batch_size) == (4, 2, 64)
    assert (totals.num_samples, totals.loss_sum, totals.num_correct) == (200, 100.0, 150.0)
    assert totals.time_s == pytest.approx(4.15)
    uncounted = job_totals([_row(), _row(num_correct=None)], window=0, num_steps=2, global_batch_size=64)
    assert uncounted.num_correct is None


def test_what_published_rules_for_exchanges_need_is_in_the_totals() -> None:
    rows = [
        _row()._replace(learning_rate=0.25, coded_wanted=3.0, coded_sent=2.0),
        _row()._replace(learning_rate=0.5, coded_wanted=1.0, coded_sent=1.0),
    ]
    noise = GradientNoise(trace=120.0, squared_norm=0.75)
    totals = job_totals(rows, window=0, num_steps=2, global_batch_size=80, noise=noise)
    assert (totals.learning_rate, totals.gradient_norm, totals.coding_gain) == (0.25, 1.5, 0.75)
    drowned = noise.__class__(trace=1.0, squared_norm=-1.0)
    plain = job_totals([_row()], window=0, num_steps=2, global_batch_size=80, noise=drowned)
    assert (plain.learning_rate, plain.gradient_norm, plain.coding_gain) == (None, None, None)
