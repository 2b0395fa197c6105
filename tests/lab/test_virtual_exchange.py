"""Communication between virtual ranks: by the trainer's codecs, with real ranks' bytes and parameters."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.support import virtual
from torch import nn

from dynamix.lab.simulator.clock import Conditions, VirtualClock
from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.simulator.exchange import (
    BucketTraffic,
    CollectiveTraffic,
    StackedInt8,
    StepTraffic,
    VirtualExchange,
    run_counted,
    total_bytes,
)
from dynamix.lab.simulator.scenario import Coding, Network, Scenario, Workers
from dynamix.schemas.messages.allocation import EXACT, LOSSY_CODECS, Allocation, Exchange
from dynamix.trainer.exchange.codec import BucketPart, BucketView, Member
from dynamix.trainer.exchange.plan import StepExchange, exchange_codec

INT8 = Exchange(codec="int8")
LONG = {"fixed_time_s": 1e3, "time_limit_s": 1e6, "evaluate_every_s": 1e6}


def lossy(**changes: Any) -> Scenario:
    return virtual.scenario(exchange="lossy", **(LONG | changes))


def start_with(exchange: Exchange, of: Scenario, **arguments: Any) -> VirtualCluster:
    """A cluster in which an exchange rules from the first step on."""
    run = virtual.cluster(of, **arguments)
    run._schedule.reset(0, Allocation(run._options.local_batch_sizes, exchange=exchange))
    return run


def parameters(run: VirtualCluster) -> torch.Tensor:
    return run.gradients.parameters.detach().clone()


def traffic_of(exchange: Exchange, num_ranks: int, num_buckets: int = 1, pretended: int = 0) -> StepTraffic:
    """What a gradient of 4096 numbers sends."""
    made = nn.Linear(64, 64, bias=False)
    sums = VirtualExchange(made, num_ranks, num_buckets=num_buckets, gradient_bytes=pretended or 4 * 4096)
    gradients = torch.randn(num_ranks, 4096, generator=torch.Generator().manual_seed(1))
    total = torch.empty(4096)
    traffic = sums.sum(gradients, StepExchange(exchange, exchange), total)
    assert torch.allclose(total, gradients.sum(0), atol=0.1 if exchange.codec in LOSSY_CODECS else 1e-5)
    return traffic


def test_bytes_are_those_that_each_codec_sends() -> None:
    ring = traffic_of(EXACT, 4)
    assert total_bytes(ring)[0] == pytest.approx([2 * 3 / 4 * (4 * 4096)] * 4)
    # each owns 1024 numbers, in messages of 2 KiB or 1 KiB and two scales: three to the owners, three back
    for codec, message_bytes in (("fp16", 2056), ("bf16", 2056), ("int8", 1032)):
        coded = traffic_of(Exchange(codec=codec), 4)
        assert [each.tolist() for each in total_bytes(coded)] == [[6 * message_bytes] * 4] * 2
        assert [each.num_messages for each in coded[0].collectives] == [6, 6]
    shares = traffic_of(Exchange(route="shares", shares=(1.0, 3.0)), 2)
    assert total_bytes(shares)[0].tolist() == [4 * (3072 + 1024)] * 2
    one, other = shares[0].collectives
    assert (one.sent.tolist(), other.sent.tolist()) == ([12288, 4096], [4096, 12288])


def test_a_pretended_gradient_sends_as_much_more_and_its_owners_own_what_they_should() -> None:
    # 8 blocks of 512 numbers for 3 owners: 3, 2 and 3
    real, pretended = (traffic_of(INT8, 3, pretended=size) for size in (0, 40 * 4096))
    real_bytes, pretended_bytes = total_bytes(real)[0], total_bytes(pretended)[0]
    assert len(set(real_bytes.tolist())) > 1
    assert pretended_bytes == pytest.approx([10 * real_bytes.mean()] * 3)
    halves = traffic_of(Exchange(route="shares", shares=(1.0, 1.0, 2.0)), 3, pretended=40 * 4096)
    assert [bucket.is_continued for bucket in halves] == [False, True]
    push, pull = halves[0].collectives
    gradient = 40 * 4096 / 2  # in two chunks
    assert push.sent == pytest.approx([gradient * away for away in (0.75, 0.75, 0.5)], rel=1e-3)
    assert pull.sent == pytest.approx([2 * gradient * home for home in (0.25, 0.25, 0.5)], rel=1e-3)


FREE = Coding(none=0.0, bf16=0.0, fp16=0.0, int8=0.0, rows=0.0, message_s=0.0, bucket_s=0.0)


def clock(links: tuple[float, ...], *, coding: Coding = FREE, **network: Any) -> VirtualClock:
    workers = tuple(Workers(samples_per_s=1000.0, bandwidth_mbit_s=link) for link in links)
    changed = virtual.scenario(workers=workers, network=Network(**network), coding=coding)
    return VirtualClock(changed, 4 * 4096)


def calm(num_ranks: int, slowdown: float = 1.0, congestion: float = 1.0) -> Conditions:
    ones = np.ones(num_ranks)
    return Conditions(slowdown * ones, congestion * ones, congestion * ones > 1)


@pytest.mark.parametrize(("links", "num_buckets"), [((8.0,) * 4, 2), ((8.0, 8.0, 2.0, 5.0), 5)])
def test_plain_all_reduces_take_what_exact_training_takes(links: tuple[float, ...], num_buckets: int) -> None:
    made = clock(links, latency_s=0.0004, overlap=0.3, num_buckets=num_buckets)
    # equal buckets, as the formula has them: 4096 numbers in rows of 64 divide by 1 and 2; by 5 nearly
    sizes, conditions = np.array([9.0, 3.0, 5.0, 7.0]), calm(4, congestion=2.0)
    traffic = traffic_of(Exchange(codec="none"), 4, num_buckets)
    found, expected = made.step(sizes, conditions, traffic=traffic), made.step(sizes, conditions)
    assert found.step_s == pytest.approx(expected.step_s, rel=1e-12 if num_buckets < 5 else 0.01)
    assert found.communication_s == pytest.approx(expected.communication_s, rel=1e-12)


def behind_one_slow_link(**changes: Any) -> Scenario:
    workers = tuple(
        Workers(samples_per_s=20000.0, overhead_s=0.002, bandwidth_mbit_s=link) for link in (400.0, 400.0, 60.0, 400.0)
    )
    network = Network(gradient_bytes=2_000_000, latency_s=0.0001, num_buckets=2)
    return virtual.scenario(workers=workers, network=network, **(LONG | changes))


def test_reports_say_how_fast_each_rank_sent_to_the_next_one() -> None:
    run = virtual.cluster(behind_one_slow_link())
    rows = run.run_window()[0].rows
    assert [row.link_peer for row in rows] == [1, 2, 3, 0]
    assert [row.link_bytes_per_s for row in rows] == pytest.approx([5e7, 7.5e6, 7.5e6, 5e7])
    under_shares = start_with(Exchange(route="shares"), behind_one_slow_link())
    assert {row.link_bytes_per_s for row in under_shares.run_window()[0].rows} == {None}
    servers = virtual.cluster(virtual.scenario(network=Network(topology="parameter-server"), **LONG))
    assert {row.link_peer for row in servers.run_window()[0].rows} == {None}


def test_coding_costs_bytes_and_messages_and_is_slowed_like_computing() -> None:
    coding = msgspec.structs.replace(FREE, int8=2.0, message_s=0.003)
    made = clock((1e9,) * 4, coding=coding, latency_s=0.0, overlap=0.0)
    step = made.step(np.ones(4), calm(4, slowdown=3.0), traffic=traffic_of(INT8, 4))
    # 2 s per million bytes of 16,384, and 12 messages of 3 ms, three times as slow
    assert step.communication_s == pytest.approx(3 * (2 * 0.016384 + 12 * 0.003), rel=1e-6)
    plain = made.step(np.ones(4), calm(4), traffic=traffic_of(Exchange(codec="none"), 4))
    assert plain.communication_s == pytest.approx(0.0, abs=1e-9)


def test_a_quota_slows_coding_and_has_each_exchange_wait_for_its_next_period() -> None:
    workers = (Workers(samples_per_s=1000.0), Workers(samples_per_s=1000.0, cores=0.4, quota_period_s=0.02))
    coding = msgspec.structs.replace(FREE, bucket_s=0.002)
    changed = virtual.scenario(workers=workers, network=Network(bandwidth_mbit_s=1e9, latency_s=0.0), coding=coding)
    made = VirtualClock(changed, 4 * 4096)
    for codec, coding_s in (("none", 0.0), ("int8", 0.002 / 0.4)):
        step = made.step(np.ones(2), calm(2), traffic=traffic_of(Exchange(codec=codec), 2), since_s=np.zeros(2))
        assert step.communication_s == pytest.approx(0.6 * 0.02 + coding_s, rel=1e-5)
        assert step.step_s == pytest.approx(0.001 + step.communication_s)


@pytest.mark.parametrize("name", ["fashion-14-mlp", "fashion-14-cnn"])
def test_codecs_without_loss_train_as_exact_training_does(name: str) -> None:
    data = virtual.data(500, dtype=torch.float64)
    exact = lossy(workload=name, noise_every=2)
    runs = [
        start_with(exchange, exact, data=data)
        for exchange in (EXACT, Exchange(route="shares", shares=(1.0, 0.0, 2.0, 5.0)), Exchange(codec="rows"))
    ]
    reports = [[report for _ in range(4) for report in run.run_window()] for run in runs]
    for run, reported in zip(runs[1:], reports[1:], strict=True):
        assert float((parameters(run) - parameters(runs[0])).abs().max()) < 1e-12
        for found, expected in zip(reported, reports[0], strict=True):
            assert found.totals.noise.trace == pytest.approx(expected.totals.noise.trace, rel=1e-9)
            assert found.totals.loss_sum == pytest.approx(expected.totals.loss_sum, rel=1e-9)


@pytest.mark.parametrize("num_ranks", [2, 9])
def test_stacked_codecs_have_the_same_bits_and_bytes_as_one_per_rank(num_ranks: int) -> None:
    stacked, members = StackedInt8(), [Member(rank, num_ranks) for rank in range(num_ranks)]
    codecs = [exchange_codec("int8") for _ in members]
    parts = (BucketPart("weight", 0, 4000, torch.Size((4000,))),)
    for step in range(6):
        rows = torch.randn(num_ranks, 4000)
        if step == 3:
            rows[1, 70] = torch.inf
        views = [BucketView(0, row, parts) for row in rows.clone().unbind()]
        seen = run_counted([codec.reduce(*of_rank) for codec, *of_rank in zip(codecs, views, members, strict=True)])
        found, is_finite = stacked.reduce(rows, members[0])
        assert is_finite == (step != 3)
        if is_finite:
            assert [one.sent.tolist() for one in found] == [one.sent.tolist() for one in seen]
            assert [one.num_messages for one in found] == [one.num_messages for one in seen]
            assert all(torch.equal(view.flat, row) for view, row in zip(views, rows, strict=True))


def test_jobs_with_parameter_servers_or_without_a_lag_permit_no_codec() -> None:
    servers = Network(topology="parameter-server")
    with pytest.raises(ValueError, match="parameter servers do not support"):
        virtual.cluster(virtual.scenario(network=servers), policy_options={"codec": "rows"})
    with pytest.raises(ValueError, match=r"use network\.topology = .ring."):
        lossy(network=servers)
    with pytest.raises(ValueError, match=r"lag_windows = 0: .* use at least 1"):
        lossy(lag_windows=0)


def test_reports_have_what_published_rules_need() -> None:
    lossy = virtual.scenario(exchange="lossy", learning_rate=0.1, noise_every=1, base_global_batch_size=32)
    totals = virtual.cluster(lossy, policy_options={"codec": "int8"}).run_window()[0].totals
    assert totals.learning_rate == pytest.approx(0.1 * (128 / 32) ** 0.5)
    assert totals.coding_gain == pytest.approx(1.0, abs=1e-3)
    expected = (totals.noise.squared_norm + totals.noise.trace / 128) ** 0.5
    assert totals.gradient_norm == pytest.approx(expected)
    assert virtual.cluster(lossy).run_window()[0].totals.coding_gain is None


def local_steps(**changes: Any) -> Scenario:
    return virtual.scenario(exchange="local", **(LONG | changes))


def started(every: int, of: Scenario, **arguments: Any) -> VirtualCluster:
    """A cluster with local steps from the first one on."""
    return virtual.cluster(of, policy_options={"every": every}, **arguments)


def test_a_round_takes_as_long_as_the_rank_that_computed_longest_in_all_of_it() -> None:
    workers = (Workers(samples_per_s=1000.0), Workers(samples_per_s=1000.0))
    clock = VirtualClock(virtual.scenario(workers=workers, network=Network(latency_s=0.0, overlap=1.0)), 1000)
    calm = Conditions(np.ones(2), np.ones(2), np.zeros(2, dtype=bool))
    ring = CollectiveTraffic(np.full(2, 1.25e6), np.full(2, 1.25e6), is_ring=True, num_messages=0)
    sent = (BucketTraffic((ring,), "none", 1.25e6),)
    # 10 and 30 ms, then 30 and 10 ms; 1.25 MB over 1.25 GB/s, none of it hidden, whatever the overlap is
    first = clock.step(np.array([10.0, 30.0]), calm, since_s=np.zeros(2))
    last = clock.step(np.array([30.0, 10.0]), calm, decided=True, traffic=sent, since_s=first.compute_s)
    assert (first.step_s, first.sync_s.tolist(), first.communication_s) == (0.030, [0.0, 0.0], 0.0)
    assert last.step_s == pytest.approx(0.010 + 0.001 + clock.decision_s)
    assert last.sync_s == pytest.approx([0.001, 0.001])
    late = clock.step(np.array([10.0, 10.0]), calm, traffic=sent, since_s=np.array([0.010, 0.030]))
    assert late.step_s == pytest.approx(0.010 + 0.001)
    assert late.sync_s == pytest.approx([0.020 + 0.001, 0.001])


def test_only_the_last_step_of_a_round_sends_anything() -> None:
    run = started(4, local_steps(window_steps=1, network=Network(num_buckets=1, gradient_bytes=1_000_000)))
    counters = [run.run_window()[0].rows[2].sockets for _ in range(8)]
    ring, sketch = 1_500_000, 6 * 1024  # of 1024 numbers that measure the noise
    first = ring + sketch
    # step 8 ends the epoch: the optimizer's momentum is averaged as well
    assert [each.tx_bytes for each in counters if each] == [0, 0, 0, first, first, first, first, 2 * first + ring]


def test_the_noise_is_that_of_ranks_which_have_the_same_parameters() -> None:
    run = started(5, local_steps(window_steps=5, noise_every=1))
    exact = virtual.cluster(local_steps(window_steps=1, noise_every=1))
    # the second is of the first step alone, from whole gradients instead of sketches
    sums = run.run_window()[0].totals.noise, exact.run_window()[0].totals.noise
    assert sums[0].trace == pytest.approx(sums[1].trace, rel=0.02)
    assert sums[0].squared_norm == pytest.approx(sums[1].squared_norm, rel=0.1)


def test_a_node_exchanges_once_and_drifts_as_one() -> None:
    network = Network(gradient_bytes=1_000_000, num_buckets=1, latency_s=0.0, overlap=0.0, bandwidth_mbit_s=80.0)
    flat, by_node = (
        local_steps(window_steps=4, ranks_per_node=2, network=msgspec.structs.replace(network, by_node=wanted))
        for wanted in (False, True)
    )
    plain, exact = virtual.cluster(flat), virtual.cluster(by_node)
    coded = start_with(Exchange(codec="rows"), by_node)
    plain.run_window()
    rows = [row for report in exact.run_window() for row in report.rows]
    assert [row.sockets and row.sockets.tx_bytes for row in rows] == [4 * 500_000] * 4, "a link carries 2 (M - 1) / M"
    assert [row.link_peer for row in rows] == [2, 3, 0, 1]
    assert [row.link_bytes_per_s for row in rows] == pytest.approx([5e6] * 4)
    assert exact.job.num_exchanging == 2
    coded.run_window()
    for run in (exact, coded):
        assert torch.allclose(parameters(run), parameters(plain), rtol=0, atol=1e-6)
        assert plain.time_s - run.time_s == pytest.approx(4 * (0.15 - 0.1), rel=0.01)  # 1.5 and 1 MB at 10 MB/s
    run = started(8, by_node)
    run.run_window()
    begun = run.rounds._ranks
    assert begun is not None
    first, same, other, _ = begun[0].detach()
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    with pytest.raises(ValueError, match="ranks_per_node that divides 4"):
        virtual.scenario(network=Network(by_node=True))
