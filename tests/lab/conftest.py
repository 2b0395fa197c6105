"""For tests of the laboratory."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small matrices gain nothing from a second thread, and waiting for one costs a busy machine a factor of ten."""
    torch.set_num_threads(1)
