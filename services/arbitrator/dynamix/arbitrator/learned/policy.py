"""Learned policies (`ppo`, `ppo-paper` and others): a network from a policy file, evaluated in numpy.

Greedy by default: of equal logits the neutral action. With the job's option `explore` 1 it samples, and the decision
carries log-probabilities and values for learning.
"""

import numpy as np

from dynamix.arbitrator.policies.model.observation import Array32
from dynamix.arbitrator.policies.options import option
from dynamix.arbitrator.policies.policy import Decision
from dynamix.arbitrator.policies.random import keyed_generator
from dynamix.schemas.messages import Job
from dynamix.schemas.networks import Forward, Normalisation, log_softmax, sample
from dynamix.schemas.policies import VERSION, VERSION_OPTION, Options, switch

from .policy_file import PolicyFile

OPTIONS: Options = {
    "explore": switch(0, "1: sample actions, for learning; 0: take the likeliest"),
    VERSION_OPTION: VERSION,
}
"""The options of every learned policy; one that scales the rule has the rule's as well."""


class LearnedPolicy:
    """A policy that decides with the network of a file; pure like every policy."""

    def __init__(self, file: PolicyFile, *, name: str = "", version: int = 1, explore: bool = False) -> None:
        """Prepare the network; `name` replaces the file's, `explore` samples even where the job does not ask for it."""
        metadata = file.metadata
        self.name = name or metadata.policy
        self.version = version
        self.digest = bytes.fromhex(file.digest)
        self.action_set = metadata.make_action_set()
        self.options: Options = {**OPTIONS, **self.action_set.options}
        self._explore = explore
        self._forward = Forward(file.tensors, len(metadata.hidden_sizes))
        self._normalisation = Normalisation.of_tensors(file.tensors)

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:
        """The network's choice in this situation."""
        situation = self.action_set.situation(job, window, obs_WF, global_F, carry)
        inputs = self._normalisation.applied(situation.inputs_DI)
        logits_DA = self._forward.logits(inputs)
        if not (self._explore or option(self.options, job, "explore")):
            found = self.action_set.decision(job, situation, logits_DA.argmax(axis=1))
            return found._replace(reason=_reason("the network's likeliest action", found.reason))
        logprobs_DA = log_softmax(logits_DA)
        choices_D = sample(logprobs_DA, keyed_generator(job, window, "explore:").random(len(logprobs_DA)))
        chosen = logprobs_DA[np.arange(len(choices_D)), choices_D]
        found = self.action_set.decision(job, situation, choices_D)
        return found._replace(
            logprobs=tuple(chosen.tolist()),
            values=tuple(self._forward.values(inputs).tolist()),
            reason=_reason("drawn from the network's actions, to learn", found.reason),
        )


def _reason(what: str, base: str) -> str:
    """Reason of a choice; for an action that scales a rule also the rule's reason."""
    return f"{what}; without it: {base}" if base else what
