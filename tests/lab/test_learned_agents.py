"""Agents that learn: untrained they are their rule, each earns what the job does, and learning continues exactly."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.support import learned, learning, virtual

from dynamix.arbitrator.deciding.signatures import Finding
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.collector.agent import Chooser
from dynamix.collector.agent_network import AgentNetwork
from dynamix.lab.learning import LearningPlan, LearningUpdate, learn
from dynamix.lab.learning.episodes import EpisodeTask, ExploringAgents, play
from dynamix.lab.learning.plan import resized
from dynamix.lab.simulator.episode import Episode, run_episode
from dynamix.reward.formula import TIME_ONLY

FILE = learned.policy_file("appetite", policy="stigmergy")
SCENARIO = msgspec.structs.replace(learning.scenarios()[0], ranks_per_node=1)


@pytest.fixture(autouse=True)
def _made_up_data(monkeypatch: pytest.MonkeyPatch) -> None:
    learning.with_made_up_data(monkeypatch)


def run(options: dict[str, float], choose: Chooser | None = None) -> Episode:
    scenario = msgspec.structs.replace(SCENARIO, fixed_time_s=0.0)
    return run_episode(
        scenario,
        policy_named("stigmergy"),
        data=virtual.data(),
        seed=1,
        policy_options=options,
        choose=choose,
        keep_messages=True,
    )


def plan(**changes: object) -> LearningPlan:
    return learning.plan("stigmergy", **({"curriculum": (2, 4, 6)} | changes))


def test_an_untrained_network_is_the_fixed_rule_to_the_bit() -> None:
    fixed, untrained = run({}), run({"learned": 1.0}, AgentNetwork(FILE.to_bytes(), "made up").factor)
    assert untrained.windows == fixed.windows
    assert untrained.evaluations == fixed.evaluations
    favoured = AgentNetwork(learned.policy_file("appetite", favour=5).to_bytes(), "made up")
    assert run({"learned": 1.0}, favoured.factor).windows != fixed.windows


def test_every_agent_earns_minus_the_time_from_where_its_first_choice_ruled_to_the_target() -> None:
    task = EpisodeTask(SCENARIO, 1, FILE.to_bytes(), "explore", "time-aware", TIME_ONLY)
    played = play(task)
    assert played.trajectory is not None
    agents = ExploringAgents(FILE, 1)
    again = run({"learned": 1.0}, agents.factor)
    assert again.time_to_target_s == played.time_s
    trajectory, first = played.trajectory, min(agents.choices) + 1 + SCENARIO.lag_windows
    assert trajectory.inputs_TDI.shape[1] == len(SCENARIO.nodes) == 4
    assert trajectory.terminated
    times = {w.window: w.job_metrics.step_time_s * w.num_steps for w in again.windows}
    before_s = sum(time_s for window, time_s in times.items() if window < first)
    np.testing.assert_allclose(trajectory.rewards_TD.sum(axis=0), before_s - played.time_s, rtol=1e-6)
    assert (trajectory.rewards_TD == trajectory.rewards_TD[:, :1]).all()


def test_while_they_learn_agents_that_see_the_same_draw_the_same() -> None:
    agents = ExploringAgents(FILE, 1)
    run({"learned": 1.0}, agents.factor)
    drawn = [{choice.action for choice in choices} for choices in agents.choices.values()]
    assert len(set.union(*drawn)) > 1
    assert sum(len(actions) for actions in drawn) < 1.1 * len(drawn)  # untrained it hardly depends on what they see


def test_a_curriculum_goes_from_few_workers_to_many() -> None:
    stages = plan(num_episodes=12)
    names = [stages.scenario_of(episode).name for episode in range(12)]
    expected = [f"{name}-of-{number}" for number in (2, 4, 6) for name in ("two-speeds", "slow-start")]
    assert list(dict.fromkeys(names)) == expected
    assert [len(stages.scenario_of(episode).nodes) for episode in (0, 4, 8)] == [2, 4, 6]


def test_a_cluster_is_resized_evenly() -> None:
    speeds = [[workers.samples_per_s for workers in resized(SCENARIO, number).per_worker] for number in (2, 4, 8)]
    assert speeds == [[4000.0, 1000.0], [4000.0] * 2 + [1000.0] * 2, [4000.0] * 4 + [1000.0] * 4]


def test_learning_of_agents_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = learn(plan(), num_workers=1)

    class KilledError(Exception):
        pass

    def kill(row: LearningUpdate, begun: Sequence[Finding]) -> None:  # noqa: ARG001 - an observer's arguments
        raise KilledError

    checkpoint = tmp_path / "agents.checkpoint"
    for _ in range(2):
        with pytest.raises(KilledError):
            learn(plan(), num_workers=1, checkpoint=checkpoint, observer=kill)
    again = learn(plan(), num_workers=1, checkpoint=checkpoint)
    assert again.file.tensors.keys() == whole.file.tensors.keys()
    assert all((again.file.tensors[name] == array).all() for name, array in whole.file.tensors.items())
    assert len(whole.history) == 3
    assert whole.file.metadata.scenarios[0] == "two-speeds-of-2"
    assert {"vs_rule", "vs_rule/two-speeds-of-6"} <= set(whole.file.metadata.scores)


def test_what_agents_learn_has_their_policys_name_and_actions() -> None:
    with pytest.raises(ValueError, match="what agents learn is 'stigmergy' with 'appetite'"):
        learning.plan("stigmergy", action_set="global")
    with pytest.raises(ValueError, match="and no other policy has these actions"):
        learning.plan("mine", action_set="appetite")
