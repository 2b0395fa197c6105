"""Levers on the rule: in bounds, remembered in the carry alone, and without any the rule itself."""

from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support import examples, learned, virtual

from dynamix.arbitrator.learned import inputs
from dynamix.arbitrator.learned.levers import LEVER_NUMBERS, LEVERS, Levers
from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.arbitrator.learned.situation import ABSOLUTE, NUM_WINDOWS, RELATIVE, WINDOW, WINDOW_INPUTS, window_inputs
from dynamix.arbitrator.policies.model.exchange_memory import LOOK_AGAIN, ExchangeMemory
from dynamix.arbitrator.policies.model.levers import Change, Lever, Wish, changed_exchange
from dynamix.arbitrator.policies.policy import Policy
from dynamix.arbitrator.policies.rule import Rule
from dynamix.lab.simulator.episode import Episode, run_episode
from dynamix.lab.simulator.scenario import Network
from dynamix.schemas.features import GLOBAL_FEATURES, RANK_FEATURES, RANK_INDEX
from dynamix.schemas.messages import Action, Job
from dynamix.schemas.messages.allocation import EXACT, Exchange, ExchangePermission

SLOW = Network(bandwidth_mbit_s=400.0, gradient_bytes=4_000_000)
NUMBERS = {lever: int(number) for number, lever in LEVERS.items()}


def episode(policy: Policy, exchange: ExchangePermission = "local") -> Episode:
    """A job behind slow links, where the rule itself changes how gradients travel."""
    scenario = virtual.scenario(exchange=exchange, network=SLOW, time_limit_s=25.0, target_accuracy=0.99)
    return run_episode(scenario, policy, data=virtual.data(), seed=3, policy_options={"track": 1.0})


def steered(lever: Lever | None = None) -> LearnedPolicy:
    """A network that always chooses this lever; an untrained one without."""
    return LearnedPolicy(learned.policy_file("levers", favour=None if lever is None else NUMBERS[lever]))


def ruled(action: Action) -> Exchange:
    return action.allocation.exchange


@pytest.mark.parametrize("exchange", ["exact", "lossy", "local"])
def test_an_untrained_policy_is_the_rule_itself_with_the_same_memory(exchange: ExchangePermission) -> None:
    rule, own = episode(Rule(), exchange), episode(steered(), exchange)
    assert [action.allocation for action in own.actions] == [action.allocation for action in rule.actions]
    pairs = zip(own.actions, rule.actions, strict=True)
    assert all(mine.carry.endswith(theirs.carry) for mine, theirs in pairs)
    assert any(ruled(action) != EXACT for action in rule.actions) == (exchange != "exact")
    assert len(rule.actions) > 2 * NUM_WINDOWS


def test_a_larger_noise_scale_gives_larger_batches_and_does_not_run_away() -> None:
    middles = {}
    for factor in (0.5, 1.0, 2.0):
        sizes = [sum(action.local_batch_sizes) for action in episode(steered(Lever(noise=factor)), "exact").actions]
        middles[factor] = float(np.median(sizes[len(sizes) // 2 :]))
    assert middles[0.5] < middles[1.0] < middles[2.0] < 4 * middles[0.5]


@pytest.mark.parametrize("change", ["probe", "none"])
def test_a_lever_on_the_exchange_holds_while_it_is_chosen(change: Change) -> None:
    """The rule goes on wishing for what it would have chosen."""
    found = episode(steered(Lever(change=change)), "lossy")
    assert {ruled(action) for action in found.actions} == {EXACT}
    assert any(ruled(action) != EXACT for action in episode(Rule(), "lossy").actions)
    rule, wish = Rule(), None
    wished, carry = [], b""
    for window, (obs_WF, global_F) in enumerate(observations(24)):
        lever = Lever(change=change) if window < 12 else Lever()
        decision, wish = rule.steered(job_of("lossy"), obs_WF, global_F, carry, lever=lever, wish=wish)
        carry = decision.carry
        assert wish is not None
        wished.append((wish.exchange, decision.allocation.exchange))
    before, after = wished[:12], wished[12:]
    assert all(decided == EXACT for _, decided in before)
    assert any(own != EXACT for own, _ in before)
    assert all(own == decided for own, decided in after)


@pytest.mark.parametrize(
    ("change", "wished", "expected"),
    [
        ("probe", Exchange(codec="int8", every=5), EXACT),
        ("shorter", Exchange(every=5), Exchange(every=2)),
        ("shorter", EXACT, EXACT),
        ("longer", Exchange(codec="int8", every=2), Exchange(codec="int8", every=5)),
        ("longer", Exchange(every=10), Exchange(every=10)),
        ("longer", Exchange(codec="rows"), Exchange(codec="rows")),
        ("bf16", Exchange(every=5), Exchange(codec="bf16", every=5)),
        ("none", Exchange(codec="int8", every=5), Exchange(every=5)),
        ("int8", Exchange(route="shares"), Exchange(codec="int8")),
        ("", Exchange(every=5), Exchange(every=5)),
    ],
)
def test_each_lever_changes_one_thing_within_the_periods_of_a_window(
    change: Change, wished: Exchange, expected: Exchange
) -> None:
    assert changed_to(change, wished, job_of("local")) == expected


def test_a_job_that_does_not_permit_a_change_keeps_the_rules_own() -> None:
    assert changed_to("int8", EXACT, job_of("exact")) == EXACT
    assert changed_to("longer", EXACT, job_of("lossy")) == EXACT
    assert changed_to("longer", EXACT, job_of("local"), ExchangeMemory(blocked=3)) == EXACT
    assert changed_to("int8", EXACT, job_of("local"), knows_times=False) == EXACT


def changed_to(
    change: Change, wished: Exchange, job: Job, memory: ExchangeMemory | None = None, **more: Any
) -> Exchange:
    known = {"knows_times": True, "max_every": 16} | more
    return changed_exchange(Lever(change=change), wished, job, memory or ExchangeMemory(), **known)


def test_a_wish_keeps_its_own_age_and_takes_a_later_one_only_of_the_same_way() -> None:
    own = Exchange(codec="int8")
    other = ExchangeMemory(ruling=(EXACT, EXACT), age=LOOK_AGAIN)
    assert (Wish(own, 4).seen_in(other).newest, Wish(own, 4).seen_in(other).age) == (own, 5)
    assert Wish(EXACT, 4).seen_in(other).age == LOOK_AGAIN


def test_a_decision_depends_on_nothing_but_its_carry() -> None:
    job, file = job_of("local", policy_options={"explore": 1.0}), learned.policy_file("levers")
    carry, carries = b"", []
    policy = LearnedPolicy(file)
    for window, (obs_WF, global_F) in enumerate(observations(2 * NUM_WINDOWS)):
        decision = policy.decide(job, window, obs_WF, global_F, carry)
        assert decision == LearnedPolicy(file).decide(job, window, obs_WF, global_F, carry)
        carry = decision.carry
        carries.append(len(carry))
    assert carries[NUM_WINDOWS] == carries[-1], "the windows in the carry are bounded"
    assert carries[0] < carries[1]


def test_the_last_windows_are_shown_against_the_newest() -> None:
    rows_KV = np.arange(3 * len(WINDOW), dtype=np.float32).reshape(3, len(WINDOW))
    shown = dict(zip(WINDOW_INPUTS, window_inputs(rows_KV).tolist(), strict=True))
    first, last = RELATIVE[0], ABSOLUTE[-1]
    assert f"{first}_0" not in shown
    assert shown[f"{first}_2"] == 2 * len(WINDOW)
    assert shown[f"{last}_2"] == 3 * len(WINDOW) - 1
    assert np.isnan(shown[f"{last}_3"])


@pytest.mark.parametrize("world_size", [1, 4, 33])
def test_one_row_is_shown_for_any_number_of_ranks_and_only_earlier_windows_are_unknown(world_size: int) -> None:
    job = examples.job({"node-a": tuple(range(world_size))})
    obs_WF = np.abs(np.random.default_rng(0).normal(100, 20, (world_size, len(RANK_FEATURES)))).astype(np.float32)
    global_F = np.ones(len(GLOBAL_FEATURES), dtype=np.float32)
    names = inputs.names("levers")
    found = Levers(range(len(names)), LEVER_NUMBERS).situation(job, 3, obs_WF, global_F, b"").inputs_DI
    assert found.shape == (1, len(names))
    unknown = {name for name, number in zip(names, found[0].tolist(), strict=True) if np.isnan(number)}
    assert unknown == {name for name in WINDOW_INPUTS if not name.endswith("_0")}


def test_a_file_with_fewer_levers_means_the_same_by_their_numbers() -> None:
    number = NUMBERS[Lever(change="probe")]
    few = Levers([0], (0.0, float(number)))
    every = Levers([0], LEVER_NUMBERS)
    obs_WF, global_F = next(iter(observations(1)))
    found = few.situation(job_of("lossy"), 0, obs_WF, global_F, b"")
    wanted = every.situation(job_of("lossy"), 0, obs_WF, global_F, b"")
    assert found.inputs_DI.shape == (1, 1)
    own = few.decision(job_of("lossy"), found, np.array([1]))
    theirs = every.decision(job_of("lossy"), wanted, np.array([number]))
    assert own.allocation == theirs.allocation
    assert few.choices(job_of("lossy"), own.carry).tolist() == [1]


def job_of(exchange: ExchangePermission, **changes: Any) -> Job:
    job = examples.job({"node-a": (0, 1), "node-b": (2, 3)}, policy="levers", supports_tracking=True, **changes)
    return msgspec.structs.replace(job, exchange=exchange)


def observations(number: int) -> list[tuple[Any, Any]]:
    """Windows of a job whose gradients take most of each step."""
    values = {"decided_local_batch_size": 128, "local_batch_size": 128, "num_samples": 1280}
    values |= {"compute_time_s": 0.02, "sync_time_s": 0.2, "step_time_s": 0.22, "tx_bytes_per_s": 5e7}
    found = []
    for window in range(number):
        obs_WF = np.full((4, len(RANK_FEATURES)), np.nan, dtype=np.float32)
        for name, value in values.items():
            obs_WF[:, RANK_INDEX[name]] = value
        obs_WF[:, RANK_INDEX["age_windows"]] = 0
        known = {"loss": 2.0 - 0.01 * window, "step_time_s": 0.22, "noise_scale": 800.0, "throughput": 2300.0}
        names = [feature.name for feature in GLOBAL_FEATURES]
        global_F = np.array([known.get(name, np.nan) for name in names], dtype=np.float32)
        found.append((obs_WF, global_F))
    return found
