"""Policy files: what is written is read, learning continues from it, and what does not fit is refused."""

import contextlib
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import learned

from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.arbitrator.learned.policy_file import PolicyFile, PolicyFileError, PPOSettings
from dynamix.arbitrator.learned.policy_store import read_policy_file
from dynamix.arbitrator.learning.ppo import Agent

CONTENT = learned.policy_file().to_bytes()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = learned.policy_file("levers", scores={"vs_rule": 0.97}, scenarios=("mixed-8", "slow-link"), seeds=(3, 4))
    (tmp_path / "ppo.safetensors").write_bytes(file.to_bytes())
    again = read_policy_file(tmp_path / "ppo.safetensors")
    assert (again.metadata, again.to_bytes(), again.digest) == (file.metadata, file.to_bytes(), file.digest)
    assert LearnedPolicy(again).digest == bytes.fromhex(file.digest)
    with pytest.raises(PolicyFileError, match="No such file"):
        read_policy_file(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"format": 2}, "format 2"),
        ({"settings": PPOSettings(hidden_sizes=(16,))}, r"tensor 'actor.2.weight' must be of shape \(5, 16\)"),
        ({"scores": {"ratio": 1e400}}, "not a policy file of DYNAMIX"),
        ({"inputs": ("ping_ms", *learned.metadata("deltas").inputs[1:])}, "policy 'ppo': its inputs .*ping_ms"),
        ({"actions": ((25.0, 0.0, -25.0, 100.0, -100.0),)}, "policy 'ppo': its actions"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], reason: str) -> None:
    file = learned.policy_file("deltas")
    changed = PolicyFile(msgspec.structs.replace(file.metadata, **fields), file.tensors).to_bytes()
    with pytest.raises(PolicyFileError, match=reason):
        LearnedPolicy(PolicyFile.from_bytes(changed))


@pytest.mark.parametrize(
    "metadata", [5, None, {}, "\ud800", "", "[" * 100_000, '{"policy": "ppo", "settings": {"gama": 1}}']
)
def test_metadata_that_are_not_ours_are_refused(metadata: object) -> None:
    with pytest.raises(PolicyFileError, match=r"metadata|not a policy file of DYNAMIX"):
        PolicyFile.from_bytes(learned.with_metadata(metadata))


@pytest.mark.parametrize("objective", ["clipped", "simplified"])
def test_learning_continues_from_a_file_where_it_stopped(objective: Literal["clipped", "simplified"]) -> None:
    file = learned.trained_policy(objective)
    again = Agent.of(PolicyFile.from_bytes(file.to_bytes()))
    assert again.file().digest == file.digest
    assert learned.learn_once(again).digest == learned.trained_policy(objective, updates=2).digest


@given(st.data())
def test_a_file_cut_off_or_damaged_is_refused_or_still_a_policy(data: st.DataObject) -> None:
    with pytest.raises(PolicyFileError):
        PolicyFile.from_bytes(CONTENT[: data.draw(st.integers(0, len(CONTENT) - 1))])
    at = data.draw(st.integers(0, 4000))
    damaged = CONTENT[:at] + bytes([data.draw(st.integers(0, 255))]) + CONTENT[at + 1 :]
    with contextlib.suppress(PolicyFileError):
        LearnedPolicy(PolicyFile.from_bytes(damaged))
