"""Episodes of one family: each begins with what the one before it taught, by the code that services run."""

from tests.support import virtual

from dynamix.arbitrator.policies.rule import Rule
from dynamix.lab.simulator.episode import Episode, run_episode
from dynamix.schemas.messages import JobProfile, Report

LONG = virtual.scenario(target_accuracy=0.5, fixed_time_s=2.0)


def episode(
    profile: JobProfile | None = None,
    *explores: str,
    seed: int = 3,
    family: str = "virtual",
    reports: list[Report] | None = None,
) -> Episode:
    return run_episode(
        *(LONG, Rule()),
        data=virtual.data(),
        seed=seed,
        family=family,
        profile=profile,
        explores=explores,  # type: ignore[arg-type]
        on_window=None if reports is None else reports.extend,
    )


def test_an_episode_leaves_a_profile_and_the_next_one_begins_with_it() -> None:
    first = episode()
    profile = first.profile
    assert (profile.run, profile.num_windows, bool(profile.memory)) == (1, first.num_windows, True)
    second = episode(profile, seed=4)
    assert second.profile.run == 2
    assert [bool(action.profile) for action in second.actions[:3]] == [True, False, False]
    assert any("the first windows agree with its profile" in action.reason for action in second.actions[:3])
    assert episode(family="").profile is None


def test_a_learning_rate_is_tried_only_where_the_job_lets_it() -> None:
    profile = episode(None, "learning_rate").profile
    assert [record.rate_factor for record in profile.arms] == [1.0]
    reports: list[Report] = []
    second = episode(profile, "learning_rate", seed=4, reports=reports)
    assert {action.allocation.rate_factor for action in second.actions} <= {1.5, 1.0}
    assert second.actions[0].allocation.rate_factor == 1.5
    windows, _, _ = virtual.messages_of(reports)
    rates = [window.job_metrics.learning_rate for window in windows]
    sizes = [sum(rank.training.local_batch_size for rank in window.ranks) for window in windows]
    assert rates[2] / (sizes[2] / sizes[0]) ** 0.5 / rates[0] > 1.4
