from tests.support import virtual

from dynamix.arbitrator.policies.registry import policy_named
from dynamix.lab.simulator.episode import Episode, run_episode
from dynamix.lab.simulator.scenario import Stragglers
from dynamix.schemas.chain import is_intact
from dynamix.schemas.codec import encode


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
