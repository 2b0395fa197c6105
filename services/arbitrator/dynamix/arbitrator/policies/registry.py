"""The registry: the policies that are code, by name. Ours come first, then those that other packages register."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamix.runtime.extensions import ExtensionError, extension_names, load_extension
from dynamix.schemas.messages import Job
from dynamix.schemas.policies import Option, Options

from .baselines import Doubling, Goodput, NoiseScale, Proportional, Random, Split, Static, Stigmergy
from .policy import Array32, Decision, NamedPolicy
from .rule import Rule

_OURS = (Static(), Split(), Random(), Proportional(), NoiseScale(), Goodput(), Doubling(), Rule(), Stigmergy())
POLICIES: Mapping[str, NamedPolicy] = {policy.name: policy for policy in _OURS}
"""The policies of this package; learned ones are files."""


@dataclass(frozen=True)
class ExtensionPolicy:
    """A policy of another package: an error in it halts the jobs that name it and no others."""

    name: str
    version: int
    options: Options
    policy: NamedPolicy

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:
        """Return the policy's own decision.

        Raises:
            ExtensionError: when it raises anything, or returns something else than a `Decision`.
        """
        try:
            return _checked_decision(self.policy.decide(job, window, obs_WF, global_F, carry))
        except (Exception, SystemExit) as error:
            place = f"{type(self.policy).__module__}.{type(self.policy).__qualname__}"
            raise ExtensionError(
                f"policy {self.name!r} ({place}) failed at window {window}: {type(error).__name__}: {error}; fix or "
                "update the package that it comes from, and restart the job"
            ) from error


def _checked_decision(found: object) -> Decision:
    if not isinstance(found, Decision):
        raise TypeError(f"decide returned {type(found).__name__}, not a Decision")
    return found


def extension_policy(name: str) -> NamedPolicy | None:
    """The policy that another package registers under a name; `None` when none does.

    Raises:
        ExtensionError: when it cannot be loaded, or is not a policy; the message names what is missing.
    """

    def checked(found: Any) -> NamedPolicy:
        """Check what `NamedPolicy` promises and can be seen without a job."""
        if missing := [part for part in ("name", "version", "options", "decide") if not hasattr(found, part)]:
            asked = "dynamix.arbitrator.policies.policy.NamedPolicy"
            raise TypeError(f"it lacks {', '.join(missing)}, which {asked} asks for")
        if found.name != name:
            raise ValueError(f"its name is {found.name!r}, not the registered one")
        if not isinstance(found.version, int) or found.version < 1:
            raise ValueError(f"its version is {found.version!r}, not a whole number from 1")
        if not isinstance(found.options, Mapping) or not all(isinstance(one, Option) for one in found.options.values()):
            raise TypeError("its options are not a mapping from names to dynamix.schemas.policies.Option")
        return ExtensionPolicy(name, found.version, found.options, found)

    return load_extension("dynamix.policies", name, checked)


def policy_named(name: str) -> NamedPolicy:
    """The policy of that name, ours or another package's.

    Raises:
        ValueError: when there is none; the text lists those there are.
        ExtensionError: as `extension_policy`.
    """
    policy = POLICIES.get(name) or extension_policy(name)
    if policy is None:
        raise ValueError(f"no policy is called {name!r}: choose one of {', '.join(policy_names())}")
    return policy


def policy_names() -> list[str]:
    """The names of all policies that are code, sorted."""
    return sorted({*POLICIES, *extension_names("dynamix.policies")})
