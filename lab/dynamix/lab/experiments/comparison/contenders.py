"""Contenders: the rows of a comparison, spelled as text, and what each runs with in a family.

    NAME[+track][:option=number,...][@SIZE][/lr=RULE][/exchange=HOW][/rate=FACTOR]

NAME is a policy, `omnilearn`, `oracle` or `best-static`; `+track` leaves the split to the fast loop; `@SIZE` replaces
the scenario's initial local batch size, within the scenario's bounds; RULE replaces the scenario's learning-rate rule,
HOW what its job permits of how gradients travel, and FACTOR multiplies its learning rate. For example `goodput+track`,
`rule:noise_multiplier=2,track=0`, `static@128`, `goodput/lr=linear`, `rule/exchange=exact`.

Two rows are the best of others, chosen for each scenario in hindsight, by the runs that are compared: `/rate=best` of
the learning rates times 0.5, 1 and 2, and `oracle` of several constant global batches, each divided by the rates that a
step will have (`dynamix.lab.simulator.clairvoyant`). `oracle` is no policy, and no row to win against.

A baseline runs with the options that were tuned for the family on train scenarios; typed options replace these. A
learned policy has one file per policy seed, and each file is run.
"""

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import cast, get_args

import msgspec

from dynamix.arbitrator.learned.policy_file import SHIPPED_POLICIES, SUFFIX, shipped_directory
from dynamix.arbitrator.policies.options import check_options
from dynamix.arbitrator.policies.registry import policy_names
from dynamix.runtime.input_files import read_regular
from dynamix.schemas.messages.allocation import EXACT, ExchangePermission, exchange_of, option_number
from dynamix.schemas.messages.policies import DEFAULT_POLICY
from dynamix.trainer.gradient.learning_rate import FACTORS, Rule

from .baselines import LABORATORY, known_policy
from .tuned import Choice, Tuned

BEST_STATIC = "best-static"
GOODPUT = "goodput"
RANDOM = "random"
ORACLE = "oracle"
TRACKED_STATIC = "static+track"
"""Static sizes under the fast loop are tuned on their own."""
LOCAL_STATIC = "static+local"
"""So are those of jobs with local steps."""
ALWAYS = tuple(dict.fromkeys((BEST_STATIC, RANDOM, GOODPUT, DEFAULT_POLICY, *SHIPPED_POLICIES)))
"""Rows of every comparison, whatever their result: baselines, random, the default and the learned policies."""

BASES = (BEST_STATIC, "best-static+track", GOODPUT, "noise-scale", "doubling", "omnilearn", "static+track@64")
"""What the default policy is compared with first of all. Each at its best of as many settings, but the last: a constant
size per worker that nothing was chosen for, under the fast loop."""
ORACLE_SIZES = (8, 16, 32, 64, 128, 256)
"""Mean samples per worker of the oracle's global batches."""
RATE_FACTORS = (0.5, 1.0, 2.0)
"""On the learning rate, of which `/rate=best` takes the best."""
BEST = "best"

EXACT_POLICIES = frozenset(
    {"split", "random", "proportional", "noise-scale", "goodput", "doubling", "stigmergy", "omnilearn", ORACLE}
)
"""They leave gradients to travel as they are, whatever a job permits, as `static` does without options that say how."""

HOW_TO_SPELL = "NAME[+track][:option=number,...][@SIZE][/lr=RULE][/exchange=HOW][/rate=FACTOR]"
_SPELLING = re.compile(
    r"(?P<base>(?P<name>[a-z0-9-]+)(?P<track>\+track)?(?::(?P<options>[^@/]*))?(?:@(?P<size>[0-9]+))?"
    r"(?:/lr=(?P<rule>[^/]*))?(?:/exchange=(?P<exchange>[^/]*))?)(?:/rate=(?P<rate>.*))?"
)
_CONTINUED = re.compile(r"[a-z_][a-z0-9_]*=.*")
"""Matches a piece between commas that is an option of the contender before it."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Policy, options and initial size of one episode; one setting per policy seed."""

    policy: str
    policy_digest: str = ""
    """SHA-256 of a learned policy's file."""
    policy_file: str = ""
    options: dict[str, float] = {}
    initial_local_batch_size: int | None = None
    """`None`: the scenario's."""
    learning_rate_rule: Rule | None = None
    """`None`: the scenario's."""
    learning_rate_factor: float = 1.0
    """On the scenario's learning rate."""
    exchange: ExchangePermission | None = None
    """What the job permits of how gradients travel; `None`: what the scenario says."""

    def identity(self) -> dict[str, object]:
        """Return what determines the decisions: everything except the path of the file."""
        about = msgspec.to_builtins(self)
        del about["policy_file"]
        if self.exchange is None:  # as before there was such a field: runs of then are known by it
            del about["exchange"]
        return cast("dict[str, object]", about)


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a comparison."""

    label: str
    """The text that it was parsed from."""
    policy: str
    options: dict[str, float] = {}
    initial_local_batch_size: int | None = None
    learning_rate_rule: Rule | None = None
    learning_rate_factor: float = 1.0
    exchange: ExchangePermission | None = None
    files: tuple[str, ...] = ()
    """Policy files, one per policy seed; empty for a policy that is not learned."""

    is_best_static: bool = False
    """Whether it starts from the static size that was chosen on train scenarios."""
    best_of: tuple["Contender", ...] = ()
    """Contenders of which the best one counts in each scenario; empty for a row that is run itself."""

    @property
    def baseline(self) -> str:
        """The name that its settings were tuned under."""
        if not self.is_best_static:
            return self.policy
        if self.options.get("every", 1) > 1:
            return LOCAL_STATIC
        return TRACKED_STATIC if self.options.get("track") else self.policy

    @property
    def is_learned(self) -> bool:
        """Whether it comes from files."""
        return self.policy in SHIPPED_POLICIES or bool(self.files)

    @property
    def decides_exchange(self) -> bool:
        """Whether what a job permits of how gradients travel makes a difference to it."""
        is_plain_static = self.policy == "static" and exchange_of(self.options) == EXACT
        return not (self.is_learned or is_plain_static or self.policy in EXACT_POLICIES)

    def permitted(self, exchange: ExchangePermission) -> "Contender":
        """Return the row with that permission, where it makes a difference and the row does not say another."""
        if self.best_of:
            parts = tuple(part.permitted(exchange) for part in self.best_of)
            return msgspec.structs.replace(self, best_of=parts)
        if self.exchange is not None or not self.decides_exchange:
            return self
        return msgspec.structs.replace(self, exchange=exchange)

    def settings(self, family: str, tuned: Tuned) -> tuple[Setting, ...]:
        """Return the settings in a family: one per policy seed, none when a learned policy has no file.

        Raises:
            ValueError: for `best-static` when nothing was tuned.
        """
        if self.best_of:
            return tuple(setting for contender in self.best_of for setting in contender.settings(family, tuned))
        names = dict.fromkeys((self.baseline, TRACKED_STATIC if self.baseline == LOCAL_STATIC else "", self.policy))
        base = self._setting(next(filter(None, (tuned.choice(name, family) for name in names)), None))
        if self.is_best_static and base.initial_local_batch_size is None:
            raise ValueError(f"no static size was chosen for {family!r}: run `dynamix tune` first")
        if not self.is_learned:
            return (base,)
        return tuple(
            msgspec.structs.replace(base, policy_file=file, policy_digest=file_digest(Path(file)))
            for file in self.files
        )

    def _setting(self, choice: Choice | None) -> Setting:
        """Combine what was chosen for the baseline with what was typed.

        Plain `static` starts from the scenario's size, and the default policy runs as it is shipped.
        """
        if choice is None or self.policy == DEFAULT_POLICY or (self.policy == "static" and not self.is_best_static):
            choice = Choice()
        typed = self.initial_local_batch_size
        return Setting(
            policy=self.policy,
            options=dict(sorted({**choice.options, **self.options}.items())),
            initial_local_batch_size=choice.initial_local_batch_size if typed is None else typed,
            learning_rate_rule=self.learning_rate_rule,
            learning_rate_factor=self.learning_rate_factor,
            exchange=self.exchange,
        )


def parse_contenders(text: str, files: Mapping[str, Sequence[str]] | None = None) -> tuple[Contender, ...]:
    """Parse a list with commas; `files` names the files of learned policies that replace the shipped ones.

    Raises:
        ValueError: when one cannot be parsed, or names a policy that does not exist.
    """
    return tuple(parse_contender(piece, files) for piece in _split(text))


def contender_names(files: Collection[str] = ()) -> list[str]:
    """All that a contender may be called, sorted; `files` are names of learned policies that come as files."""
    return sorted({*policy_names(), *LABORATORY, *SHIPPED_POLICIES, *files, BEST_STATIC, ORACLE})


def parse_contender(text: str, files: Mapping[str, Sequence[str]] | None = None) -> Contender:
    """Parse one contender; raises as `parse_contenders`."""
    match = _SPELLING.fullmatch(text)
    if match is None:
        raise ValueError(f"policy {text!r}: write {HOW_TO_SPELL}")
    if match["rate"] == BEST:
        spelled = [match["base"] if factor == 1 else f"{match['base']}/rate={factor:g}" for factor in RATE_FACTORS]
        return _best_of(text, match["name"], spelled, files)
    if match["name"] == ORACLE and match["size"] is None:
        return _best_of(text, ORACLE, [text.replace(ORACLE, f"{ORACLE}@{size}", 1) for size in ORACLE_SIZES], files)
    options = _options(match["options"] or "", text)
    if match["track"]:
        options["track"] = 1.0
    names = contender_names(files or {})
    if match["name"] not in names:
        raise ValueError(f"no policy is called {match['name']!r}: choose one of {', '.join(names)}")
    policy = "static" if match["name"] == BEST_STATIC else match["name"]
    if policy == ORACLE:
        check_options(policy, {}, options)
    elif policy not in SHIPPED_POLICIES and policy not in (files or {}):
        check_options(policy, known_policy(policy).options, options)
    return Contender(
        label=text,
        policy=policy,
        options=options,
        initial_local_batch_size=int(match["size"]) if match["size"] else None,
        learning_rate_rule=_rule(match["rule"], text),
        learning_rate_factor=_factor(match["rate"], text),
        exchange=_permission(match["exchange"], text),
        files=_files(match["name"], files or {}),
        is_best_static=match["name"] == BEST_STATIC,
    )


def _best_of(label: str, name: str, spelled: Iterable[str], files: Mapping[str, Sequence[str]] | None) -> Contender:
    parts = tuple(parse_contender(text, files) for text in spelled)
    if any(part.best_of for part in parts):
        raise ValueError(f"policy {label!r}: the best of rows that are the best of others is no row")
    return Contender(label=label, policy=parts[0].policy, files=_files(name, files or {}), best_of=parts)


def with_references(asked: Iterable[Contender], files: Mapping[str, Sequence[str]] | None = None) -> list[Contender]:
    """Return the rows that every comparison shows, then the given contenders; each once."""
    rows = {label: parse_contender(label, files) for label in ALWAYS}
    return list((rows | {contender.label: contender for contender in asked}).values())


def untuned_families(contender: Contender, families: Iterable[str], tuned: Tuned) -> list[str]:
    """Return the families in which nothing was tuned for a baseline; plain `static` and typed sizes need no tuning."""
    if contender.best_of:
        return untuned_families(contender.best_of[0], families, tuned)
    is_plain_static = contender.policy == "static" and not contender.is_best_static
    if is_plain_static or contender.is_learned or contender.policy == ORACLE:
        return []
    return [family for family in families if tuned.choice(contender.baseline, family) is None]


def _split(text: str) -> list[str]:
    pieces: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if pieces and _CONTINUED.fullmatch(piece):
            pieces[-1] += f",{piece}"
        else:
            pieces.append(piece)
    return pieces


def _options(text: str, whole: str) -> dict[str, float]:
    options = {}
    for piece in filter(None, text.split(",")):
        name, _, number = piece.partition("=")
        try:
            options[name] = option_number(name, number)
        except ValueError as error:
            reason = str(error) if number else f"option {piece!r} must be NAME=NUMBER"
            raise ValueError(f"policy {whole!r}: {reason}") from None
    return options


def _rule(text: str | None, whole: str) -> Rule | None:
    if text is None:
        return None
    if text not in FACTORS:
        raise ValueError(f"policy {whole!r}: learning-rate rule {text!r} must be one of {', '.join(FACTORS)}")
    return cast("Rule", text)


def _permission(text: str | None, whole: str) -> ExchangePermission | None:
    if text is not None and text not in get_args(ExchangePermission):
        known = ", ".join(get_args(ExchangePermission))
        raise ValueError(f"policy {whole!r}: what a job permits of its gradients, {text!r}, must be one of {known}")
    return cast("ExchangePermission | None", text)


def _factor(text: str | None, whole: str) -> float:
    try:
        factor = 1.0 if text is None else float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise ValueError(f"policy {whole!r}: the factor on the learning rate is a number above 0, or {BEST}")
    return factor


def _files(name: str, files: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    if name in files:
        return tuple(files[name])
    return tuple(map(str, shipped_files(name))) if name in SHIPPED_POLICIES else ()


def shipped_files(name: str, directory: Path | None = None) -> list[Path]:
    """Return the shipped files of a learned policy, one per policy seed; the longest matching name owns a file."""
    found = sorted((directory or shipped_directory()).glob(f"{name}*{SUFFIX}"))
    return [path for path in found if _owner(path.stem) == name]


@lru_cache(maxsize=256)
def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        ValueError: when it cannot be read.
    """
    try:
        return hashlib.sha256(read_regular(path)).hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read the policy file {path}: {error.strerror}") from error


def _owner(stem: str) -> str | None:
    owners = [name for name in SHIPPED_POLICIES if stem == name or stem.startswith(f"{name}-")]
    return max(owners, key=len, default=None)
