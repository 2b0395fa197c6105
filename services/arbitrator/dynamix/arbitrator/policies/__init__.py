"""The policies, by name."""

from collections.abc import Mapping
from types import MappingProxyType

from .doubling import Doubling
from .goodput import Goodput
from .noise_scale import NoiseScale
from .policy import NamedPolicy
from .proportional import Proportional
from .random import Random
from .rule import Rule
from .static import Static

POLICIES: Mapping[str, NamedPolicy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (Static(), Random(), Proportional(), NoiseScale(), Goodput(), Doubling(), Rule())
    }
)
"""Those that are code alone; learned ones are files."""


def policy_named(name: str) -> NamedPolicy:
    """The policy of that name.

    Raises:
        ValueError: when there is none; the text lists those there are.
    """
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"no policy is called {name!r}: choose one of {', '.join(sorted(POLICIES))}") from None
