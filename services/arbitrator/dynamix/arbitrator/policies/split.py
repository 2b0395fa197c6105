"""`split`: the job's global batch as the script chose it, divided by measured speed. The default.

The training processes divide it after every step (the fast loop). Where they cannot, this policy divides it once per
window as `proportional` does. Samples per step, steps per epoch and learning rate are those of plain training.
"""

from typing import ClassVar

from dynamix.schemas.policies import POLICY_OPTIONS, Options

from .proportional import Proportional


class Split(Proportional):
    """Keeps the global batch and leaves its division to the training processes."""

    name = "split"
    options: ClassVar[Options] = POLICY_OPTIONS["split"]
