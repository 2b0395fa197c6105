"""What a learned policy's choices depend on."""

import numpy as np
import pytest
from tests.support import learned

from dynamix.arbitrator.learned.policy import INPUTS, SIZES
from dynamix.arbitrator.learned.policy_file import ActionSetName, PolicyFile
from dynamix.arbitrator.learned.response import DEVIATIONS, dependence, is_dead, responses, typical_states


def found(file: PolicyFile) -> dict[str, float]:
    return dependence(file, typical_states(file))


@pytest.mark.parametrize("action_set", ["levers", "deltas"])
def test_a_policy_is_dead_unless_its_choices_depend_on_what_it_sees(action_set: ActionSetName) -> None:
    neutral = (0,) if action_set == "deltas" else (0, 2, 1)
    biased = found(learned.policy_file(action_set, favour=neutral))
    assert is_dead(biased)
    assert set(biased.values()) == {0.0}
    alive = found(learned.policy_file(action_set, gain=300.0))
    assert not is_dead(alive)
    assert alive["all"] > 0.5


def of_one_input(name: str) -> PolicyFile:
    """The batch doubles where this input is above its mean, and halves below."""
    file = learned.policy_file()
    tensors = {key: np.zeros_like(array) if key.startswith("actor") else array for key, array in file.tensors.items()}
    tensors["actor.0.weight"][0, INPUTS["levers"].index(name)] = 1.0
    tensors["actor.2.weight"][0, 0] = 1.0
    tensors["actor.4.weight"][SIZES.index(2.0), 0] = 50.0
    tensors["actor.4.weight"][SIZES.index(0.5), 0] = -50.0
    return file._replace(tensors=tensors)


def test_a_policy_depends_on_the_inputs_that_its_network_uses_and_responds_to_them_alone() -> None:
    file = of_one_input("batch_to_noise_log2")
    shares = found(file)
    assert shares["all"] == shares["noise"] == pytest.approx(0.5, abs=0.05)
    assert {share for group, share in shares.items() if group not in ("all", "noise")} == {0.0}
    response = {name: levers[0] for name, levers in responses(file).items()}
    expected = np.where(DEVIATIONS > 0, 2.0, 0.5)
    expected[len(DEVIATIONS) // 2] = np.mean(SIZES)
    assert response["batch_to_noise_log2"] == pytest.approx(expected, abs=1e-4)
    assert {round(value, 4) for value in response["room_above_log2"].tolist()} == {round(np.mean(SIZES), 4)}
