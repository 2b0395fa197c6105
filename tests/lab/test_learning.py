"""Learning on the surrogate: what is kept, and gone on with to the same bits."""

from collections.abc import Sequence
from pathlib import Path

import joblib
import msgspec
import pytest
from tests.support import learning

from dynamix.arbitrator.deciding.signatures import Finding
from dynamix.lab.comparison import tuning
from dynamix.lab.learning import LearningUpdate, learn
from dynamix.lab.learning.run import (
    SCORE_SEEDS,
    VALIDATION_SEEDS,
    LearningCheckpoint,
    LearningCheckpointError,
)
from dynamix.reward.formula import Weights


@pytest.fixture(autouse=True)
def _made_up_data(monkeypatch: pytest.MonkeyPatch) -> None:
    learning.with_made_up_data(monkeypatch)


@pytest.mark.parametrize("policy", ["ppo", "ppo-paper"])
def test_learning_is_the_same_to_the_last_bit_however_often_killed_and_with_any_number_of_workers(
    policy: str, tmp_path: Path
) -> None:
    plan = learning.plan(policy)
    whole = learn(plan, num_workers=1)

    class KilledError(Exception):
        pass

    def kill(row: LearningUpdate, begun: Sequence[Finding]) -> None:  # noqa: ARG001 - an observer's arguments
        raise KilledError

    checkpoint = tmp_path / "ppo.checkpoint"
    with joblib.parallel_config(backend="threading"):  # workers that have the made-up data
        for _ in range(2):
            with pytest.raises(KilledError):
                learn(plan, num_workers=2, checkpoint=checkpoint, observer=kill)
            (tmp_path / "ppo.checkpoint.partial").write_bytes(b"cut o")
        again = learn(plan, num_workers=2, checkpoint=checkpoint)
    assert again.file.to_bytes() == whole.file.to_bytes()
    assert [msgspec.structs.replace(row, elapsed_s=0.0) for row in again.history] == [
        msgspec.structs.replace(row, elapsed_s=0.0) for row in whole.history
    ]
    assert len(whole.history) == 3


def test_the_best_version_by_validation_is_handed_out_with_scores_on_other_seeds() -> None:
    learned_ = learn(learning.plan(), num_workers=1)
    validated = [row.validation_vs_rule for row in learned_.history]
    assert [value is not None for value in validated] == [False, True, True]
    best = min(range(1, 3), key=lambda number: validated[number] or float("inf"))
    metadata = learned_.file.metadata
    assert metadata.num_updates == best + 1  # never the untrained one, which is the rule itself
    assert metadata.scores["num_runs"] == 2
    assert {"vs_rule", "vs_rule/two-speeds", "vs_rule/slow-start"} <= set(metadata.scores)
    assert metadata.scenarios == ("two-speeds", "slow-start")


def test_deltas_are_learned_by_the_published_reward_and_the_simplified_objective() -> None:
    settings = msgspec.structs.replace(learning.SETTINGS, objective="simplified")
    plan = learning.plan("ppo-paper", formula=None, weights=Weights(), settings=settings)
    result = learn(plan, num_workers=1)
    assert result.history[0].stats.num_decisions % 4 == 0
    assert result.history[0].stats.explained_variance is None
    metadata = result.file.metadata
    assert (metadata.action_set, metadata.reward_formula) == ("deltas", "auto")


def test_a_checkpoint_of_another_plan_or_a_broken_one_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "ppo.checkpoint"
    learn(learning.plan(num_updates=1), num_workers=1, checkpoint=checkpoint)
    with pytest.raises(LearningCheckpointError, match="belongs to another plan: remove it"):
        LearningCheckpoint.read(checkpoint, learning.plan(seed=1))
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with pytest.raises(LearningCheckpointError, match="cannot be read"):
        LearningCheckpoint.read(checkpoint, learning.plan(num_updates=1))


def test_versions_are_validated_and_scored_on_seeds_of_their_own() -> None:
    assert tuning.FIRST_SEED + 1000 < VALIDATION_SEEDS < SCORE_SEEDS
