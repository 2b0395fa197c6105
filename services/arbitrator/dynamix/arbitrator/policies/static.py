"""`static`: the sizes that the job started with. The baseline of every comparison.

With the fast loop (option `track`) their sum stays and the training processes divide it.
"""

from typing import ClassVar

from dynamix.schemas.messages import Job

from .model.observation import Array32
from .options import Options, allocation_of, track
from .policy import Decision


class Static:
    """Never changes anything."""

    name = "static"
    version = 1
    options: ClassVar[Options] = {"track": track(0)}

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The job's initial sizes."""
        return Decision(allocation_of(self.options, job, job.initial_local_batch_sizes))
