"""Agents that learn: untrained they are their rule, each earns what the job does, and learning continues exactly."""

import msgspec
import numpy as np
import pytest
from tests.support import learned, learning, virtual

from dynamix.arbitrator.policies.registry import policy_named
from dynamix.lab.learning import LearningPlan
from dynamix.lab.learning.episodes import EpisodeTask, ExploringAgents, play
from dynamix.lab.simulator.episode import run_episode
from dynamix.reward.formula import TIME_ONLY

FILE = learned.policy_file("appetite", policy="stigmergy")
SCENARIO = msgspec.structs.replace(learning.scenarios()[0], ranks_per_node=1)


@pytest.fixture(autouse=True)
def _made_up_data(monkeypatch: pytest.MonkeyPatch) -> None:
    learning.with_made_up_data(monkeypatch)


def plan(**changes: object) -> LearningPlan:
    return learning.plan("stigmergy", **({"curriculum": (2, 4, 6)} | changes))


def test_every_agent_earns_minus_the_time_from_where_its_first_choice_ruled_to_the_target() -> None:
    task = EpisodeTask(SCENARIO, 1, FILE.to_bytes(), "explore", "time-aware", TIME_ONLY)
    played = play(task)
    agents = ExploringAgents(FILE, 1)
    again = run_episode(
        msgspec.structs.replace(SCENARIO, fixed_time_s=0.0),
        policy_named("stigmergy"),
        data=virtual.data(),
        seed=1,
        policy_options={"learned": 1.0},
        choose=agents.factor,
        keep_messages=True,
    )
    assert again.time_to_target_s == played.time_s
    trajectory, first = played.trajectory, min(agents.choices) + 1 + SCENARIO.lag_windows
    assert trajectory.inputs_TDI.shape[1] == len(SCENARIO.nodes) == 4
    assert trajectory.terminated
    times = {w.window: w.job_metrics.step_time_s * w.num_steps for w in again.windows}
    before_s = sum(time_s for window, time_s in times.items() if window < first)
    np.testing.assert_allclose(trajectory.rewards_TD.sum(axis=0), before_s - played.time_s, rtol=1e-6)
    assert (trajectory.rewards_TD == trajectory.rewards_TD[:, :1]).all()


def test_a_curriculum_goes_from_few_workers_to_many() -> None:
    stages = plan(num_episodes=12)
    names = [stages.scenario_of(episode).name for episode in range(12)]
    expected = [f"{name}-of-{number}" for number in (2, 4, 6) for name in ("two-speeds", "slow-start")]
    assert list(dict.fromkeys(names)) == expected
    assert [len(stages.scenario_of(episode).nodes) for episode in (0, 4, 8)] == [2, 4, 6]


def test_what_agents_learn_has_their_policys_name_and_actions() -> None:
    with pytest.raises(ValueError, match="what agents learn is 'stigmergy' with 'appetite'"):
        learning.plan("stigmergy", action_set="global")
    with pytest.raises(ValueError, match="and no other policy has these actions"):
        learning.plan("mine", action_set="appetite")
