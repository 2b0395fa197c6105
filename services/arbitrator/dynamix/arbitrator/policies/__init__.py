"""The policies, by name."""

from collections.abc import Mapping
from types import MappingProxyType

from dynamix.arbitrator.policy import Policy

from .proportional import Proportional
from .random import Random
from .static import Static

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {policy.name: policy for policy in (Static(), Random(), Proportional())}
)


def policy_named(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ValueError: when there is none; the text lists those there are.
    """
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"no policy is called {name!r}: choose one of {', '.join(sorted(POLICIES))}") from None
