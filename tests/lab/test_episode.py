"""Episodes in virtual clusters: of one job, of one family, and of jobs that agents steer."""

import pytest
from tests.support import virtual

from dynamix.arbitrator.policies.registry import policy_named
from dynamix.arbitrator.policies.rule import Rule
from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.simulator.episode import Episode, run_episode
from dynamix.lab.simulator.scenario import Scenario, Stragglers
from dynamix.schemas.chain import is_intact
from dynamix.schemas.codec import encode
from dynamix.schemas.messages import Action, JobProfile, Report, Trace


def episode(policy: str = "static", seed: int = 3, **arguments: object) -> Episode:
    scenario = arguments.pop("scenario", None) or virtual.scenario()
    return run_episode(scenario, policy_named(policy), data=virtual.data(), seed=seed, **arguments)  # type: ignore[arg-type]


def test_an_episode_says_when_the_target_was_reached_and_how_good_it_was_at_the_fixed_time() -> None:
    result = episode()
    reached = [point.time_s for point in result.evaluations if point.accuracy >= 0.5]
    assert result.time_to_target_s == reached[0]
    assert [point.time_s for point in result.evaluations][:4] == [0.25, 0.5, 0.75, 1.0]
    assert result.accuracy_at_fixed_time == result.evaluations[3].accuracy
    assert result.virtual_time_s >= 1.0
    assert result.num_steps == 5 * result.num_windows
    assert result.samples_seen == 128 * result.num_steps - (result.num_steps // 8) * 24  # an epoch ends with 104
    assert 0.5 < result.test_accuracy < 1.0


def test_the_policy_decides_every_window_and_rules_with_the_lag() -> None:
    result = episode("proportional")
    assert [action.window for action in result.actions] == list(range(result.num_windows))
    assert all(is_intact(encode(action)) for action in result.actions)
    assert [(a.decided_window, a.effective_window) for a in result.applied] == [
        (window, window + 2) for window in range(result.num_windows - 1)
    ]
    # 2 ms + 32/4000 = 10 ms and 32 ms for 32 samples: 3200 and 1000 samples/s
    assert result.actions[0].local_batch_sizes == (49, 49, 15, 15)


def test_equal_seeds_give_equal_episodes_and_policies_meet_the_same_disturbances() -> None:
    tables = Stragglers(factor=3.0, mean_normal_s=0.3, mean_slow_s=0.2, jitter=0.1)
    stragglers = virtual.scenario(stragglers=tables)
    first, again, other = (episode("proportional", seed, scenario=stragglers) for seed in (3, 3, 4))
    assert first == again
    assert first.evaluations != other.evaluations


# --- episodes of one family ---

LONG_JOB = virtual.scenario(target_accuracy=0.5, fixed_time_s=2.0)


def of_family(
    profile: JobProfile | None = None,
    *explores: str,
    seed: int = 3,
    family: str = "virtual",
    reports: list[Report] | None = None,
) -> Episode:
    return run_episode(
        *(LONG_JOB, Rule()),
        data=virtual.data(),
        seed=seed,
        family=family,
        profile=profile,
        explores=explores,  # type: ignore[arg-type]
        on_window=None if reports is None else reports.extend,
    )


def test_an_episode_leaves_a_profile_and_the_next_one_begins_with_it() -> None:
    first = of_family()
    profile = first.profile
    assert (profile.run, profile.num_windows, bool(profile.memory)) == (1, first.num_windows, True)
    second = of_family(profile, seed=4)
    assert second.profile.run == 2
    assert [bool(action.profile) for action in second.actions[:3]] == [True, False, False]
    assert any("the first windows agree with its profile" in action.reason for action in second.actions[:3])
    assert of_family(family="").profile is None


def test_a_learning_rate_is_tried_only_where_the_job_lets_it() -> None:
    profile = of_family(None, "learning_rate").profile
    assert [record.rate_factor for record in profile.arms] == [1.0]
    reports: list[Report] = []
    second = of_family(profile, "learning_rate", seed=4, reports=reports)
    assert {action.allocation.rate_factor for action in second.actions} <= {1.5, 1.0}
    assert second.actions[0].allocation.rate_factor == 1.5
    windows, _, _ = virtual.messages_of(reports)
    rates = [window.job_metrics.learning_rate for window in windows]
    sizes = [sum(rank.training.local_batch_size for rank in window.ranks) for window in windows]
    assert rates[2] / (sizes[2] / sizes[0]) ** 0.5 / rates[0] > 1.4


# --- jobs that no centre steers: ranks of two nodes with 3200 and 1000 samples per second at 32 each ---

SLOW_NODE = "virtual-1"
LONG = {"target_accuracy": 1.0, "time_limit_s": 2.5}
"""A target that is never reached: some twenty windows."""
KEEP = {"dead_band": 1.0}
"""An appetite is at most twice the global batch: with this it stays."""


class _WithoutArbitrator(VirtualCluster):
    def offer(self, action: Action) -> None:
        """No action arrives."""


class _OneAgentDies(VirtualCluster):
    def leave_trace(self, trace: Trace) -> None:
        """That of the slow node leaves one trace and dies."""
        if trace.node != SLOW_NODE or trace.window == 0:
            super().leave_trace(trace)


def run(
    options: dict[str, float] | None = None,
    *,
    cluster: type[VirtualCluster] = VirtualCluster,
    scenario: Scenario | None = None,
) -> tuple[Episode, list[tuple[int, ...]]]:
    """A job, and the sizes of its windows."""
    sizes: list[tuple[int, ...]] = []

    def record(reports: list[Report]) -> None:
        sizes.append(tuple(row.local_batch_size for report in reports for row in report.rows))

    episode = run_episode(
        scenario or virtual.scenario(ranks_per_node=2, **LONG),
        policy_named("stigmergy"),
        data=virtual.data(),
        seed=3,
        policy_options=options or {},
        on_window=record,
        make_cluster=cluster,
    )
    return episode, sizes


def test_the_traces_of_window_0_divide_window_2_by_speed() -> None:
    _, sizes = run(KEEP)
    assert sizes[:3] == [(32, 32, 32, 32), (32, 32, 32, 32), (49, 49, 15, 15)]
    assert all(sum(each) == 128 for each in sizes)


def test_the_global_batch_is_the_mean_appetite_of_the_agents() -> None:
    _, sizes = run()
    assert {sum(each) for each in sizes[:2]} == {128}
    assert sum(sizes[2]) != 128
    slowest = [max(each[0] / 4000 + 0.002, each[3] / 1000) for each in sizes]
    fastest = [min(each[0] / 4000 + 0.002, each[3] / 1000) for each in sizes]
    assert slowest[0] / fastest[0] == pytest.approx(3.2)
    assert slowest[-1] / fastest[-1] < 1.1


def test_without_an_arbitrator_the_same_happens() -> None:
    (steered, sizes), (alone, without) = run(), run(cluster=_WithoutArbitrator)
    assert sizes == without
    assert steered.evaluations == alone.evaluations
    assert (len(steered.applied) > 0, len(alone.applied)) == (True, 0)


def test_an_agent_that_dies_leaves_its_ranks_with_their_share() -> None:
    _, sizes = run(KEEP, cluster=_OneAgentDies)
    assert len(sizes) > 12  # its trace has gone by then
    assert set(sizes[2:]) == {(49, 49, 15, 15)}
