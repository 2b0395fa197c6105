"""Rows of a comparison: a policy with its options and settings, from a TOML file or a short text.

A file holds one table `[[row]]` per row, with the keys of `Row`; `scenarios/rows/` has those of the published
comparisons. The text is a list `NAME[:KEY=VALUE,...],...`, where KEY is an option of the policy or a key of `Row`:
`goodput`, `rule:noise_multiplier=2`, `static:track=1,local_batch_size=128`.

Two kinds of rows are the best of several others, chosen for each scenario in hindsight by the compared runs:
`learning_rate_factor = "best"` (of 0.5, 1 and 2), and `oracle` without a size (of several constant global batches, each
divided by the speeds that every step will have, see `simulator.cluster`). `oracle` is not a policy but a bound.

A baseline runs with the options that were tuned for the family on train scenarios; options of the row replace these. A
learned policy has one file per policy seed, and each file is run.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from dynamix.arbitrator.learned.policy_file import SHIPPED_POLICIES, SUFFIX, shipped_directory
from dynamix.arbitrator.policies.policy import NamedPolicy
from dynamix.arbitrator.policies.registry import policy_named, policy_names
from dynamix.runtime.extensions import extension_names
from dynamix.runtime.input_files import read_regular
from dynamix.schemas.messages.allocation import EXACT, EXCHANGE_CODECS, ExchangePermission
from dynamix.schemas.policies import DEFAULT_POLICY, check_options, exchange_of, option_value

from .baselines import Bandit, OmniLearn

T = TypeVar("T")

BEST_STATIC = "best-static"
GOODPUT = "goodput"
RANDOM = "random"
ORACLE = "oracle"
TRACKED_STATIC, LOCAL_STATIC = "static+track", "static+local"
"""Static sizes under the fast loop, and those of jobs with local steps, are tuned separately."""
ALWAYS = tuple(dict.fromkeys((BEST_STATIC, RANDOM, GOODPUT, DEFAULT_POLICY, *SHIPPED_POLICIES)))
"""Rows of every comparison, whatever their result: baselines, random, the default and the learned policies."""
BASES = (BEST_STATIC, "best-static+track", GOODPUT, "noise-scale", "doubling", "omnilearn", "static+track@64")
"""Rows with which the default policy is compared first. All are the best of as many settings, except the last: a
constant size per rank, not chosen for anything, under the fast loop."""
ORACLE_SIZES = (8, 16, 32, 64, 128, 256)
"""Mean samples per rank of the oracle's global batches."""
RATE_FACTORS = (0.5, 1.0, 2.0)
"""Factors on the learning rate, of which `learning_rate_factor = "best"` uses the best."""
EXACT_POLICIES = frozenset(
    {"split", "random", "proportional", "noise-scale", "goodput", "doubling", "stigmergy", "omnilearn", "ppo-paper"}
    | {ORACLE}
)
"""Policies that never change the gradient exchange; nor does `static` without options for it."""
LABORATORY: Mapping[str, NamedPolicy] = {OmniLearn.name: OmniLearn(), Bandit.name: Bandit()}


def known_policy(name: str) -> NamedPolicy:
    """The baseline or policy of that name; raises as `policy_named`."""
    return LABORATORY.get(name) or policy_named(name)


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The best setting of a baseline in one family, with the scores of all settings."""

    setting: str = ""
    """The best setting, spelled as a contender."""
    options: dict[str, float | str] = {}
    initial_local_batch_size: int | None = None
    score_s: float = 0.0
    """Geometric mean of the times to the target, a miss counted as the time limit."""
    scores_s: dict[str, float] = {}
    misses: dict[str, int] = {}


class Tuned(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All choices by family and policy, and how they were made."""

    command: str = ""
    scenarios: str = ""
    """SHA-256 of the train scenarios they were made on."""
    code: str = ""
    """SHA-256 of the code that ran the episodes."""
    seeds: list[int] = []
    num_settings: int = 0
    """Settings per baseline: the same budget for all."""
    families: dict[str, dict[str, Choice]] = {}
    overall: dict[str, Choice] = {}
    """Choices over all train scenarios, families weighted equally, for families without train scenarios."""

    def choice(self, policy: str, family: str) -> Choice | None:
        """Return the choice for a policy; `None` for one that was not tuned."""
        return self.families.get(family, {}).get(policy) or self.overall.get(policy)

    def with_choices(self, other: "Tuned") -> "Tuned":
        """Return these choices and another file's, which count where both have one; the origin is this file's."""
        names = dict.fromkeys((*self.families, *other.families))
        families = {name: {**self.families.get(name, {}), **other.families.get(name, {})} for name in names}
        return msgspec.structs.replace(self, families=families, overall={**self.overall, **other.overall})


def read_tuned(path: Path) -> Tuned:
    """The settings in a file. Raises ValueError when it is missing or not such a file, with how to make it."""
    return _decoded(path, Tuned, f"tune the baselines with `dynamix evaluate tune -o {path}`")


def _decoded(path: Path, kind: type[T], how: str) -> T:
    try:
        return msgspec.toml.decode(read_regular(path), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path}: {reason}; {how}") from error


def to_toml(tuned: Tuned) -> str:
    """The text of the file."""

    def value_of(value: object) -> str:
        """A TOML value; text and numbers are spelled as in JSON."""
        if isinstance(value, dict):
            return "{" + ", ".join(f"{value_of(key)} = {value_of(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(value_of, value)) + "]"
        return msgspec.json.encode(value).decode()

    lines = ["# Written by `dynamix evaluate tune`; do not edit. Times in virtual seconds.", ""]
    about = ("command", "scenarios", "code", "seeds", "num_settings")
    lines += [f"{name} = {value_of(getattr(tuned, name))}" for name in about]
    families = {f"families.{value_of(family)}": choices for family, choices in tuned.families.items()}
    for prefix, choices in {**families, "overall": tuned.overall}.items():
        for policy, choice in choices.items():
            lines += ["", f"[{prefix}.{value_of(policy)}]"]
            known = msgspec.to_builtins(choice)
            lines += [f"{name} = {value_of(value)}" for name, value in known.items() if value is not None]
    return "\n".join(lines) + "\n"


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of a comparison; also, with a family's tuned options filled in, the setting of one run."""

    policy: str
    """A policy, `omnilearn`, `oracle`, or `best-static`: `static` with the size that was chosen on train scenarios."""
    options: dict[str, float | str] = {}
    local_batch_size: Annotated[int, Meta(ge=1)] | None = None
    """Initial local batch size, within the scenario's bounds; `None`: the tuned one, else the scenario's."""
    learning_rate_factor: Annotated[float, Meta(gt=0)] | Literal["best"] = 1.0
    """On the scenario's learning rate."""
    exchange: ExchangePermission | None = None
    """Permission of the job for codecs and local steps; `None`: the scenario's."""
    files: tuple[str, ...] = ()
    """Files of a learned policy, one per policy seed; by default the shipped ones."""
    name: str = ""
    """Label in tables; by default the policy with all that is set."""
    against: bool = False
    """Whether all rows are compared with this one."""

    @property
    def label(self) -> str:
        """Unique among the rows of a comparison."""
        return self.name or self.policy

    @property
    def is_learned(self) -> bool:
        """Whether it comes from files."""
        return self.policy in SHIPPED_POLICIES or bool(self.files)

    @property
    def policy_files(self) -> tuple[str, ...]:
        """Its files, or the shipped ones."""
        shipped = shipped_files(self.policy) if self.policy in SHIPPED_POLICIES and not self.files else ()
        return (*self.files, *map(str, shipped))

    @property
    def best_of(self) -> tuple["Row", ...]:
        """Rows of which the best one counts in each scenario; empty for a row that is run itself."""
        if self.learning_rate_factor == "best":
            stem = self.label.removesuffix("/rate=best")
            names = {factor: stem if factor == 1 else f"{stem}/rate={factor:g}" for factor in RATE_FACTORS}
            return tuple(replace(self, name=name, learning_rate_factor=factor) for factor, name in names.items())
        if self.policy == ORACLE and self.local_batch_size is None:
            names = {size: self.label.replace(ORACLE, f"{ORACLE}@{size}", 1) for size in ORACLE_SIZES}
            return tuple(replace(self, name=name, local_batch_size=size) for size, name in names.items())
        return ()

    @property
    def baseline(self) -> str:
        """The name under which its settings were tuned."""
        if self.policy not in {"static", BEST_STATIC}:
            return self.policy
        if float(self.options.get("every", 1)) > 1:
            return LOCAL_STATIC
        return TRACKED_STATIC if self.options.get("track") else "static"

    def permitted(self, exchange: ExchangePermission) -> "Row":
        """The row with that permission, where the policy can use one and the row has none."""
        is_static = self.policy in {"static", BEST_STATIC} and exchange_of(self.options) == EXACT
        is_exact = is_static or self.policy in EXACT_POLICIES
        return self if is_exact or self.exchange is not None else replace(self, exchange=exchange)

    def settings(self, family: str, tuned: Tuned) -> tuple["Row", ...]:
        """The settings in a family: one per policy seed, none for a learned policy without files.

        Plain `static` starts from the scenario's size, and the default policy runs as it is shipped.

        Raises:
            ValueError: for `best-static` when nothing was tuned, or a file that cannot be read.
        """
        if parts := self.best_of:
            return tuple(setting for part in parts for setting in part.settings(family, tuned))
        choice = Choice()
        if self.policy not in {DEFAULT_POLICY, "static"}:
            fallbacks = {LOCAL_STATIC: (TRACKED_STATIC, "static"), TRACKED_STATIC: ("static",)}
            names = (self.baseline, *fallbacks.get(self.baseline, ()))
            choice = next(filter(None, (tuned.choice(name, family) for name in names)), None) or choice
        size = self.local_batch_size if self.local_batch_size is not None else choice.initial_local_batch_size
        if self.policy == BEST_STATIC and size is None:
            raise ValueError(f"no static size was chosen for {family!r}: run `dynamix evaluate tune` first")
        setting = replace(
            self,
            policy="static" if self.policy == BEST_STATIC else self.policy,
            options=dict(sorted({**choice.options, **self.options}.items())),
            local_batch_size=size,
            files=(),
            name="",
            against=False,
        )
        if not self.is_learned:
            return (setting,)
        settings = tuple(replace(setting, files=(file,)) for file in self.policy_files)
        for each in settings:
            file_digest(each.files[0])
        return settings

    def identity(self) -> dict[str, object]:
        """Everything that determines the decisions of a setting, except the file's path."""
        about: dict[str, object] = {
            "policy": self.policy,
            "policy_digest": file_digest(self.files[0]) if self.files else "",
            "options": self.options,
            "initial_local_batch_size": self.local_batch_size,
            "learning_rate_factor": self.learning_rate_factor,
        }
        return about if self.exchange is None else {**about, "exchange": self.exchange}


class _RowFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    row: list[dict[str, Any]]


def read_rows(path: Path) -> tuple[Row, ...]:
    """The rows of a TOML file. Raises ValueError when it or a row cannot be used, naming file and row."""
    tables = _decoded(path, _RowFile, "name a TOML file with a table [[row]] per row (scenarios/rows has examples)")
    rows = []
    for number, table in enumerate(tables.row, start=1):
        try:
            rows.append(make_row(table))
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from error
    labels = [row.label for row in rows]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"{path}: two rows are called {twice[0]!r}: give one of them another `name`")
    return tuple(rows)


def parse_rows(text: str) -> tuple[Row, ...]:
    """Rows from a list with commas, `NAME[:KEY=VALUE,...],...`; `files` has one path here.

    Raises:
        ValueError: when one cannot be parsed, or names a policy that does not exist.
    """
    pieces: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if pieces and re.fullmatch(r"[a-z_][a-z0-9_]*=[^:]*", piece):  # a further key of the row before it
            pieces[-1] += f",{piece}"
        else:
            pieces.append(piece)
    rows = []
    for piece in pieces:
        policy, _, keys = piece.partition(":")
        options: dict[str, str] = {}
        table: dict[str, Any] = {"policy": policy, "options": options}
        for pair in filter(None, keys.split(",")):
            key, equals, value = pair.partition("=")
            if not equals or not value:
                raise ValueError(f"policy {piece!r}: write NAME[:KEY=VALUE,...], {pair!r} is not KEY=VALUE")
            if key in {"local_batch_size", "learning_rate_factor", "exchange", "files", "against"}:
                table[key] = [value] if key == "files" else value
            else:
                options[key] = value
        try:
            rows.append(make_row(table, strict=False))
        except ValueError as error:
            raise ValueError(f"policy {piece!r}: {error}") from error
    return tuple(rows)


def make_row(table: Mapping[str, Any], *, strict: bool = True) -> Row:
    """A checked row of the keys of `Row`; without `strict` numbers may be given as text.

    Raises:
        ValueError: when a key or value cannot be used.
    """
    named = table.get("options") or {}
    if not isinstance(named, dict):
        raise ValueError("options must be a table: options = { track = 1 }")  # noqa: TRY004 - of a user's file
    options = {key: option_value(value) if isinstance(value, str) else value for key, value in named.items()}
    try:
        row = msgspec.convert({**table, "options": options}, Row, strict=strict)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    known = {*policy_names(), *LABORATORY, *SHIPPED_POLICIES, BEST_STATIC, ORACLE}
    if not row.files and row.policy not in known:
        raise ValueError(f"no policy is called {row.policy!r}: choose one of {', '.join(sorted(known))}")
    if row.learning_rate_factor == "best" and row.policy == ORACLE and row.local_batch_size is None:
        raise ValueError("the best rate of a row that is itself the best of several: set local_batch_size")
    if row.learning_rate_factor == math.inf:
        raise ValueError("learning_rate_factor must be finite, or best")
    if not row.is_learned:
        policy = "static" if row.policy == BEST_STATIC else row.policy
        check_options(policy, {} if policy == ORACLE else known_policy(policy).options, options)
        codec = exchange_of(options).codec
        if codec not in (codecs := (*EXCHANGE_CODECS, *extension_names("dynamix.codecs"))):
            raise ValueError(f"option codec={codec}: use one of {', '.join(codecs)}")
    return row if row.name else replace(row, name=_label(row, named))


def _label(row: Row, named: Mapping[str, object]) -> str:
    """The policy and all that is set, such as `goodput+track:hysteresis=0@64/rate=best`."""
    is_tracked = row.options.get("track") == 1
    values = {key: f"{value:g}" if isinstance(value, float | int) else value for key, value in named.items()}
    options = ",".join(f"{key}={value}" for key, value in values.items() if not (is_tracked and key == "track"))
    factor = row.learning_rate_factor
    parts = {
        row.policy: True,
        "+track": is_tracked,
        f":{options}": options,
        f"@{row.local_batch_size}": row.local_batch_size,
        f"/exchange={row.exchange}": row.exchange,
        f"/rate={factor if isinstance(factor, str) else format(factor, 'g')}": factor != 1,
    }
    return "".join(text for text, is_set in parts.items() if is_set)


def with_references(asked: Iterable[Row]) -> list[Row]:
    """The rows that every comparison shows, then the given ones; each once."""
    rows = {row.label: row for row in parse_rows(",".join(ALWAYS))}
    return list((rows | {row.label: row for row in asked}).values())


def untuned_families(row: Row, families: Iterable[str], tuned: Tuned) -> list[str]:
    """The families in which nothing was tuned for a baseline; plain `static` needs no tuning."""
    if row.policy in {"static", ORACLE} or row.is_learned:
        return []
    return [family for family in families if tuned.choice(row.baseline, family) is None]


def shipped_files(name: str) -> list[Path]:
    """The shipped files of a learned policy, one per policy seed: NAME and NAME-SEED."""
    found = sorted(shipped_directory().glob(f"{name}*{SUFFIX}"))
    return [path for path in found if re.fullmatch(rf"{name}(-\d+)?", path.stem)]


@lru_cache(maxsize=256)
def file_digest(path: str) -> str:
    """SHA-256 of a policy file. Raises ValueError when it cannot be read."""
    try:
        return hashlib.sha256(read_regular(Path(path))).hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read the policy file {path}: {error.strerror}") from error
