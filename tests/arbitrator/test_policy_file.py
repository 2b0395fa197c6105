"""Policy files: what is written is read, and what does not fit is refused by name."""

import contextlib
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import learned, trained_policies

from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.arbitrator.learned.policy_file import PolicyFile, PolicyFileError
from dynamix.arbitrator.learning.agent import Agent
from dynamix.schemas.features import FEATURE_VERSION


def changed(**fields: Any) -> bytes:
    """A policy whose metadata says something else."""
    file = learned.policy_file("deltas")
    return PolicyFile(msgspec.structs.replace(file.metadata, **fields), file.tensors).to_bytes()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = learned.policy_file(
        "global", scores={"vs_rule": 0.97}, scenarios=("mixed-8", "slow-link"), parent="ab" * 32, seeds=(3, 4)
    )
    (tmp_path / "ppo.safetensors").write_bytes(file.to_bytes())
    again = PolicyFile.read(tmp_path / "ppo.safetensors")
    assert again.metadata == file.metadata
    assert again.to_bytes() == file.to_bytes()
    assert again.digest == file.digest
    assert LearnedPolicy(again).digest == bytes.fromhex(file.digest)
    assert [path.name for path in tmp_path.iterdir()] == ["ppo.safetensors"]


def test_a_file_that_names_an_unknown_feature_is_refused_by_its_name() -> None:
    fields = learned.metadata("deltas").rank_features
    with pytest.raises(PolicyFileError, match="list of rank features names ping_ms, which this program does not have"):
        PolicyFile.from_bytes(changed(rank_features=tuple("ping_ms" if n == "srtt_us" else n for n in fields)))


def test_a_policy_of_an_older_list_of_features_is_read_and_of_a_newer_one_is_not() -> None:
    fields = learned.metadata("deltas").rank_features
    older = tuple(name for name in fields if not name.startswith(("node_", "run_queue", "context_")))
    assert PolicyFile.from_bytes(changed(rank_features=older, feature_version=1)).metadata.feature_version == 1
    with pytest.raises(PolicyFileError, match="or a newer one"):
        PolicyFile.from_bytes(changed(feature_version=FEATURE_VERSION + 1))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"feature_version": 99}, f"features of version 99, this program has version {FEATURE_VERSION}"),
        ({"format": 2}, "format 2, this program reads 1"),
        ({"inputs": ()}, "list of inputs is empty"),
        ({"inputs": ("size_log2", "ping_ms")}, "list of inputs names ping_ms, which this program does not have"),
        ({"actions": (0.0, 1.0)}, "list of actions names 1.0, which this program does not have"),
        ({"actions": (0.0, 25.0, 0.0)}, "list of actions is empty or names something twice"),
        ({"actions": (25.0, 0.0)}, "its first action is 25, not the neutral one, 0"),
        ({"hidden_sizes": (16,)}, r"tensor 'actor.2.weight' must be of shape \(5, 16\), not \(16, 16\)"),
        ({"action_set": "global"}, "list of inputs"),
        ({"scores": {"ratio": 1e400}}, "metadata"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(PolicyFileError, match=reason):
        PolicyFile.from_bytes(changed(**fields))


@pytest.mark.parametrize("metadata", [5, None, [], {}, True, 1.5, "\ud800", "", "[" * 100_000])
def test_metadata_that_are_no_text_of_ours_are_refused(metadata: object) -> None:
    with pytest.raises(PolicyFileError, match="metadata"):
        PolicyFile.from_bytes(trained_policies.with_metadata(metadata))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"clip_coeff": 0.1}, "its settings are not PPO's: .*clip_coeff"),
        ({"update_epochs": 0}, "its settings are not PPO's: .*update_epochs"),
        ({"gamma": "much"}, "its settings are not PPO's: .*gamma"),
        (
            {"hidden_sizes": [64, 64]},
            r"those of another network: clipped, hidden_sizes \(64, 64\), where .*\(16, 16\)",
        ),
        ({"objective": "simplified"}, "are those of another network: simplified"),
    ],
)
def test_settings_that_learning_cannot_continue_with_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(PolicyFileError, match=reason):
        PolicyFile.from_bytes(changed(settings=settings))


@pytest.mark.parametrize("objective", ["clipped", "simplified"])
def test_learning_continues_from_a_file_where_it_stopped(objective: Literal["clipped", "simplified"]) -> None:
    file = trained_policies.trained_policy(objective)
    again = Agent.of(PolicyFile.from_bytes(file.to_bytes()))
    assert again.file().digest == file.digest
    assert trained_policies.learn_once(again).digest == trained_policies.trained_policy(objective, updates=2).digest


@given(st.data())
def test_a_file_cut_off_or_damaged_is_refused_or_still_a_policy(data: st.DataObject) -> None:
    content = _CONTENT
    cut = content[: data.draw(st.integers(0, len(content) - 1))]
    with pytest.raises(PolicyFileError):
        PolicyFile.from_bytes(cut)
    at = data.draw(st.integers(0, 4000))
    damaged = content[:at] + bytes([data.draw(st.integers(0, 255))]) + content[at + 1 :]
    with contextlib.suppress(PolicyFileError):
        LearnedPolicy(PolicyFile.from_bytes(damaged))


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(PolicyFileError):
        PolicyFile.from_bytes(content)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyFileError, match=r"none\.safetensors: cannot be read"):
        PolicyFile.read(tmp_path / "none.safetensors")


_CONTENT = learned.policy_file().to_bytes()
