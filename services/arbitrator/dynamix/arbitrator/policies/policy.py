"""What a policy is, as authors of policies import it."""

from .base.policy import MAX_REASON, MISTAKES, Decision, Knowledge, NamedPolicy, Policy, RecurringPolicy, digest_of

__all__ = ["MAX_REASON", "MISTAKES", "Decision", "Knowledge", "NamedPolicy", "Policy", "RecurringPolicy", "digest_of"]
