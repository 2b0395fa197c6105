"""Policy files: what is written is read, and what does not fit is refused by name."""

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import learned

from dynamix.arbitrator.policies.learned import LearnedPolicy
from dynamix.arbitrator.policy_file import PolicyFile, PolicyFileError


def changed(**fields: Any) -> bytes:
    """A policy whose metadata says something else."""
    file = learned.policy_file("deltas")
    return PolicyFile(msgspec.structs.replace(file.metadata, **fields), file.tensors).to_bytes()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = learned.policy_file(
        "global", scores={"vs_rule": 0.97}, scenarios=("mixed-8", "slow-link"), parent="ab" * 32, seeds=(3, 4)
    )
    file.write(tmp_path / "ppo.safetensors")
    again = PolicyFile.read(tmp_path / "ppo.safetensors")
    assert again.metadata == file.metadata
    assert again.to_bytes() == file.to_bytes()
    assert again.digest == file.digest
    assert LearnedPolicy(again).digest == bytes.fromhex(file.digest)
    assert [path.name for path in tmp_path.iterdir()] == ["ppo.safetensors"]


def test_equal_policies_are_equal_bytes_and_others_are_not() -> None:
    assert learned.policy_file().to_bytes() == learned.policy_file().to_bytes()
    assert learned.policy_file(seeds=(12,)).digest != learned.policy_file().digest


def test_another_list_of_features_is_refused_and_says_what_differs() -> None:
    fields = learned.metadata("deltas").rank_features
    with pytest.raises(PolicyFileError, match="rank features is not this program's: it lacks srtt_us and has ping_ms;"):
        PolicyFile.from_bytes(changed(rank_features=tuple("ping_ms" if n == "srtt_us" else n for n in fields)))
    with pytest.raises(PolicyFileError, match="has another order"):
        PolicyFile.from_bytes(changed(rank_features=fields[::-1]))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"feature_version": 99}, "features of version 99, this program has version 1"),
        ({"format": 2}, "format 2, this program reads 1"),
        ({"inputs": ()}, "list of inputs"),
        ({"actions": (0.0, 1.0)}, "list of actions"),
        ({"hidden_sizes": (16,)}, r"tensor 'actor.2.weight' must be of shape \(5, 16\), not \(16, 16\)"),
        ({"action_set": "global"}, "list of inputs"),
        ({"scores": {"ratio": 1e400}}, "metadata"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(PolicyFileError, match=reason):
        PolicyFile.from_bytes(changed(**fields))


def test_an_unknown_word_in_the_metadata_is_refused() -> None:
    data = learned.policy_file().to_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = json.loads(header["__metadata__"]["dynamix"]) | {"colour": "red"}
    header["__metadata__"]["dynamix"] = json.dumps(metadata)
    text = json.dumps(header).encode()
    with pytest.raises(PolicyFileError, match="colour"):
        PolicyFile.from_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_a_number_that_is_not_finite_is_refused() -> None:
    file = learned.policy_file()
    bias = np.full_like(file.tensors["actor.4.bias"], np.nan)
    data = PolicyFile(file.metadata, {**file.tensors, "actor.4.bias": bias}).to_bytes()
    with pytest.raises(PolicyFileError, match=r"actor.4.bias.*not finite"):
        PolicyFile.from_bytes(data)


def test_a_foreign_tensor_is_refused() -> None:
    file = learned.policy_file()
    data = PolicyFile(file.metadata, {**file.tensors, "payload": np.zeros(3, dtype=np.float32)}).to_bytes()
    with pytest.raises(PolicyFileError, match="payload"):
        PolicyFile.from_bytes(data)


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
