"""Random numbers that a script's own sampler or stream may draw: torch's, numpy's and Python's, as one state."""

import random
from typing import Any, NamedTuple, Self

import numpy as np
import torch


class RandomNumbers(NamedTuple):
    """A state of all generators that a process has by default."""

    of_torch: torch.Tensor
    of_numpy: Any
    of_python: Any

    @classmethod
    def capture(cls) -> Self:
        """The states that the generators have now."""
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())  # noqa: NPY002 - scripts use it

    def restore(self) -> None:
        """Go on from here."""
        torch.set_rng_state(self.of_torch)
        np.random.set_state(self.of_numpy)  # noqa: NPY002
        random.setstate(self.of_python)


def seed_all(seed: int, epoch: int) -> int:
    """Begin an epoch's numbers; returns what seeds a further generator."""
    value = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
    torch.default_generator.manual_seed(value)
    np.random.seed(value)  # noqa: NPY002
    random.seed(value)
    return value
