"""What a script is told about the policy that it names. Whether there is one of that name only the arbitrator knows."""

import logging

from dynamix.schemas.messages.policies import KEEPS_GLOBAL_BATCH, OUR_POLICIES, RECURRING
from dynamix.schemas.spelling import nearest

from .options import JobOptions

_log = logging.getLogger("dynamix.trainer")


def warn_of_policy(options: JobOptions) -> None:
    """Warn of a policy that is not ours, and of one that will not do all that it does elsewhere; once per job."""
    policy = options.policy
    if policy not in OUR_POLICIES:
        near = nearest(policy, OUR_POLICIES)
        _log.warning(
            "policy %r is not one of ours%s: the job is steered only if the arbitrator has a learned policy of that "
            "name, or one of another package",
            policy,
            f" (did you mean {near!r}?)" if near else f" ({', '.join(sorted(OUR_POLICIES))})",
        )
    elif options.global_batch == "fixed" and policy not in KEEPS_GLOBAL_BATCH:
        _log.warning(
            "policy %r may change the global batch, but it is fixed at %d: only its division will follow the "
            "decisions; attach(global_batch='adaptive') lets the policy change it",
            policy,
            sum(options.local_batch_sizes),
        )
    if options.family and policy in OUR_POLICIES - RECURRING:
        _log.warning(
            "policy %r leaves nothing to later runs of the family %r, and begins with nothing: %s does, which moves "
            "the global batch (global_batch='adaptive')",
            policy,
            options.family,
            ", ".join(map(repr, sorted(RECURRING))),
        )
