"""Learning on virtual clusters: what is learned from, credited, kept, and gone on with to the same bits."""

from collections.abc import Sequence
from pathlib import Path

import joblib
import msgspec
import pytest
from tests.support import learned, learning, virtual

from dynamix.arbitrator.deciding.signatures import Finding
from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.lab.comparison import tuning
from dynamix.lab.learning import LearningPlan, LearningUpdate, learn, plan_named
from dynamix.lab.learning.episodes import EpisodeTask, play
from dynamix.lab.learning.run import (
    SCORE_SEEDS,
    SEEDS_PER_LEARNING,
    TRAINING_SEEDS,
    VALIDATION_SEEDS,
    LearningCheckpoint,
    LearningCheckpointError,
)
from dynamix.lab.simulator.episode import EpisodeError, run_episode
from dynamix.reward.formula import TIME_ONLY, Weights

ON_SURROGATE = {"surrogate_updates": 3, "num_episodes": 0}


@pytest.fixture(autouse=True)
def _made_up_data(monkeypatch: pytest.MonkeyPatch) -> None:
    learning.with_made_up_data(monkeypatch)


def test_the_time_aware_return_is_minus_the_time_from_the_first_decision_to_the_target() -> None:
    content = learned.policy_file("levers").to_bytes()
    task = EpisodeTask(learning.scenarios()[0], 1, content, explores=True, formula="time-aware", weights=TIME_ONLY)
    played = play(task)
    assert not played.missed
    assert played.trajectory.terminated
    scenario = msgspec.structs.replace(task.scenario, fixed_time_s=0.0)
    again = run_episode(
        scenario,
        LearnedPolicy(learned.policy_file("levers"), explore=True),
        data=virtual.data(),
        seed=1,
        keep_messages=True,
    )
    assert again.time_to_target_s == played.time_s
    first_ruled = min(applied.effective_window for applied in again.applied)
    before_s = sum(w.job_metrics.step_time_s * w.num_steps for w in again.windows if w.window < first_ruled)
    assert played.trajectory.total_reward == pytest.approx(before_s - played.time_s, rel=1e-6)


@pytest.mark.parametrize("changes", [ON_SURROGATE, {"surrogate_updates": 1, "num_episodes": 8}])
def test_learning_is_the_same_to_the_last_bit_however_often_it_is_killed(
    changes: dict[str, int], tmp_path: Path
) -> None:
    """In three updates: all on the surrogate, or one there and two in virtual clusters."""
    plan = learning.plan(**changes)
    whole = learn(plan, num_workers=1)

    class KilledError(Exception):
        pass

    def kill(row: LearningUpdate, begun: Sequence[Finding]) -> None:  # noqa: ARG001 - an observer's arguments
        raise KilledError

    checkpoint = tmp_path / "ppo.checkpoint"
    for _ in range(2):
        with pytest.raises(KilledError):
            learn(plan, num_workers=1, checkpoint=checkpoint, observer=kill)
        (tmp_path / "ppo.checkpoint.partial").write_bytes(b"cut o")
    again = learn(plan, num_workers=1, checkpoint=checkpoint)
    assert dict(again.file.tensors).keys() == dict(whole.file.tensors).keys()
    assert all((again.file.tensors[name] == array).all() for name, array in whole.file.tensors.items())
    assert [msgspec.structs.replace(row, elapsed_s=0.0) for row in again.history] == [
        msgspec.structs.replace(row, elapsed_s=0.0) for row in whole.history
    ]
    assert len(whole.history) == 3
    assert whole.finished


@pytest.mark.parametrize("policy", ["ppo", "ppo-paper"])
def test_learning_on_the_surrogate_is_the_same_to_the_last_bit_with_any_number_of_workers(policy: str) -> None:
    plan = learning.plan(policy, **ON_SURROGATE)
    alone = learn(plan, num_workers=1)
    with joblib.parallel_config(backend="threading"):  # workers that have the made-up data
        together = learn(plan, num_workers=2)
    assert together.file.to_bytes() == alone.file.to_bytes()
    assert [row.num_episodes for row in alone.history] == [0, 0, 0]
    assert {row.vs_rule for row in alone.history} == {None}


def test_the_best_version_by_validation_is_handed_out_with_scores_on_other_seeds() -> None:
    learned_ = learn(learning.plan(), num_workers=1)
    validated = [row.validation_vs_rule for row in learned_.history]
    assert [value is not None for value in validated] == [False, True, True]
    best = min(range(1, 3), key=lambda number: validated[number] or float("inf"))
    metadata = learned_.file.metadata
    assert metadata.num_updates == best + 1  # never the untrained one, which is the rule itself
    assert metadata.num_episodes == learned_.history[best].num_episodes
    assert metadata.scores["num_runs"] == 2
    assert {"vs_rule", "vs_rule/two-speeds", "vs_rule/slow-start"} <= set(metadata.scores)
    assert metadata.scenarios == ("two-speeds", "slow-start")


def test_deltas_are_learned_by_the_published_reward_and_the_simplified_objective_after_each_episode() -> None:
    settings = msgspec.structs.replace(learning.SETTINGS, objective="simplified")
    each = {"num_episodes": 2, "episodes_per_update": 1, "validate_every": 2}
    plan = learning.plan("ppo-paper", formula=None, weights=Weights(), settings=settings, **each)
    result = learn(plan, num_workers=1)
    assert [row.num_episodes for row in result.history] == [1, 2]
    assert result.history[0].num_decisions % 4 == 0
    assert result.history[0].explained_variance is None
    metadata = result.file.metadata
    assert (metadata.action_set, metadata.reward_formula) == ("deltas", "auto")
    assert metadata.num_updates == 2


def test_a_checkpoint_of_another_plan_or_a_broken_one_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "ppo.checkpoint"
    learn(learning.plan(num_episodes=4), num_workers=1, checkpoint=checkpoint)
    with pytest.raises(LearningCheckpointError, match="belongs to another plan: remove it"):
        LearningCheckpoint.read(checkpoint, learning.plan(seed=1))
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with pytest.raises(LearningCheckpointError, match="cannot be read"):
        LearningCheckpoint.read(checkpoint, learning.plan(num_episodes=4))


def test_episodes_too_short_to_teach_anything_are_named() -> None:
    too_easy = msgspec.structs.replace(learning.scenarios()[0], name="too-easy", target_accuracy=0.0)
    plan: LearningPlan = plan_named("ppo", (too_easy,), surrogate_updates=0, num_episodes=1, num_validation_seeds=1)
    with pytest.raises(EpisodeError, match=r"scenario too-easy, seed \d+, and all other .* raise target_accuracy"):
        learn(plan, num_workers=1)


def test_episodes_are_learned_from_validated_and_scored_on_seeds_of_their_own() -> None:
    plan = learning.plan(num_episodes=SEEDS_PER_LEARNING, seed=3)
    learned_from = {plan.training_seed(episode) for episode in (0, SEEDS_PER_LEARNING - 1)}
    assert plan.training_seed(SEEDS_PER_LEARNING - 1) < learning.plan(seed=4).training_seed(0)
    assert 0 < VALIDATION_SEEDS < SCORE_SEEDS < TRAINING_SEEDS <= min(learned_from)
    assert tuning.FIRST_SEED + 1000 < VALIDATION_SEEDS
    with pytest.raises(ValueError, match=f"at most {SEEDS_PER_LEARNING}"):
        learning.plan(num_episodes=SEEDS_PER_LEARNING + 1)
