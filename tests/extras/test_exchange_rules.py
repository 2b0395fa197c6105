"""Published rules for the gradient exchange: their decisions, by numbers from their papers' formulas."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from tests.support import examples

from dynamix.arbitrator.policies.registry import policy_named
from dynamix.schemas.features import GLOBAL_FEATURES, GLOBAL_INDEX, RANK_FEATURES
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT, Exchange, ExchangePermission
from dynamix.schemas.policies import initial_exchange

RULES = ("diloco", "qsr", "adacomm", "accordion", "gravac")
OBS_WF = np.full((4, len(RANK_FEATURES)), np.nan, dtype=np.float32)


def job(permission: ExchangePermission = "local", **options: float | str) -> Job:
    return examples.job(exchange=permission, policy_options=options)


def decided(policy: str, of: Job, windows: Iterable[dict[str, float]]) -> list[Exchange]:
    """The exchange after each window, of which some features of the job are known."""
    found, carry = [], b""
    for window, known in enumerate(windows):
        global_F = np.full(len(GLOBAL_FEATURES), np.nan, dtype=np.float32)
        for name, value in known.items():
            global_F[GLOBAL_INDEX[name]] = value
        decision = policy_named(policy).decide(of, window, OBS_WF, global_F, carry)
        assert decision.allocation.local_batch_sizes == of.initial_local_batch_sizes
        carry = decision.carry
        found.append(decision.allocation.exchange)
    return found


def periods(exchanges: Sequence[Exchange]) -> list[int]:
    return [each.every for each in exchanges]


def codecs(exchanges: Sequence[Exchange]) -> list[str]:
    return [each.codec for each in exchanges]


def test_diloco_makes_rounds_with_outer_steps_as_its_options_say() -> None:
    published = Exchange(every=8, outer_rate=0.7, outer_momentum=0.9)
    assert decided("diloco", job(), [{}]) == [published] == [initial_exchange("diloco", {})]
    longer = Exchange(every=16, codec="int8", outer_rate=0.7, outer_momentum=0.9)
    assert decided("diloco", job(every=16, codec="int8"), [{}]) == [longer]


@pytest.mark.parametrize("policy", RULES)
def test_a_carry_of_something_else_is_a_beginning(policy: str) -> None:
    seen = np.ones(len(GLOBAL_FEATURES), dtype=np.float32)
    expected = policy_named(policy).decide(job(), 0, OBS_WF, seen, b"")
    assert policy_named(policy).decide(job(), 0, OBS_WF, seen, bytes(1000)) == expected


@pytest.mark.parametrize("policy", RULES)
def test_nothing_is_decided_that_a_job_does_not_permit(policy: str) -> None:
    seen = {"learning_rate": 0.01, "loss": 1.0, "gradient_norm": 1.0, "throughput": 100.0, "coding_gain": 1.0}
    assert decided(policy, job("exact"), [seen] * 30) == [EXACT] * 30
    assert all(each.every == 1 for each in decided(policy, job("lossy"), [seen] * 30))


def test_qsr_makes_rounds_longer_as_the_square_of_the_learning_rate_falls() -> None:
    rates = [math.nan, 0.4, 0.1, 0.05, math.nan, 0.02]
    found = decided("qsr", job(alpha=0.2, h_min=4, codec="int8"), [{"learning_rate": rate} for rate in rates])
    assert periods(found) == [4, 4, 4, 16, 16, 100]
    assert codecs(found) == ["int8"] * 6


def test_adacomm_follows_the_square_root_of_the_loss_and_goes_on_where_it_stalls() -> None:
    losses = [2.0, 4.0, 1.0, 0.7, 2.9, 2.9, 2.9, 2.9]
    found = decided("adacomm", job(tau_0=8, interval=2), [{"loss": loss, "learning_rate": 0.1} for loss in losses])
    # F_0 = 3; then sqrt(0.85 / 3) * 8 = 4.3; then sqrt(2.9 / 3) * 8 is not below 5: halved, and again
    assert periods(found) == [8, 8, 8, 5, 5, 3, 3, 2]


def test_adacomm_makes_rounds_longer_when_the_learning_rate_falls() -> None:
    windows = [{"loss": 1.0, "learning_rate": rate} for rate in (0.4, 0.4, 0.1)]
    assert periods(decided("adacomm", job(tau_0=8, interval=1), windows)) == [8, 4, 16]
    assert periods(decided("adacomm", job(tau_0=8, interval=1), [{}] * 3)) == [8, 8, 8]


def test_accordion_compresses_hard_while_the_norm_is_steady() -> None:
    norms = [4.0, 4.0, 1.5, 2.0, 2.0, 1.5, 3.0, 3.0]
    found = decided("accordion", job(interval=2), [{"gradient_norm": norm} for norm in norms])
    # means 4, 1.75, 1.75, 3: changes of 0.56, 0 and 0.71
    assert codecs(found) == ["bf16", "bf16", "bf16", "bf16", "bf16", "int8", "int8", "bf16"]
    falls = [{"gradient_norm": 1.0, "learning_rate": rate} for rate in (0.1, 0.1, 0.01, 0.01)]
    assert codecs(decided("accordion", job(interval=1), falls)) == ["bf16", "int8", "bf16", "int8"]
    assert codecs(decided("accordion", job(mild="none"), [{}] * 2)) == ["none", "none"]


@pytest.mark.parametrize(
    ("gains", "best"), [({"bf16": 0.99, "int8": 0.98}, "int8"), ({"bf16": 0.8, "int8": 0.6}, "bf16"), ({}, "none")]
)
def test_gravac_tries_codecs_and_keeps_the_one_of_most_throughput_times_gain(
    gains: dict[str, float], best: str
) -> None:
    throughput, search = {"none": 100.0, "bf16": 150.0, "int8": 160.0}, ["none"] * 4 + ["bf16"] * 4 + ["int8"] * 4
    expected = [*search, *[best] * 6, *search, *[best] * 6]
    active = ["none", "none", *expected]  # a decision is active two windows later
    windows = [{"throughput": throughput[codec], "coding_gain": gains.get(codec, math.nan)} for codec in active]
    assert codecs(decided("gravac", job(trial=4, hold=6), windows[: len(expected)])) == expected
