"""Settings that were chosen for the baselines on train scenarios: `scenarios/tuned.toml`, by `dynamix tune`."""

from pathlib import Path

import msgspec

from dynamix.runtime.input_files import read_regular


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The best setting of a baseline in one family, with the scores of all settings."""

    setting: str = ""
    """The best setting, spelled as a contender."""
    options: dict[str, float] = {}
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

    def is_fallback(self, family: str) -> bool:
        """Return whether the family has no train scenarios, so that the choice over all of them is used."""
        return bool(self.overall) and family not in self.families


def read_tuned(path: Path) -> Tuned:
    """Read the file.

    Raises:
        ValueError: when it is missing or not such a file; the text says how to make it.
    """
    try:
        return msgspec.toml.decode(read_regular(path), type=Tuned)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: tune the baselines with `dynamix tune -o {path}`") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: this holds no settings: its values are nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}; write it again with `dynamix tune -o {path}`") from error


def to_toml(tuned: Tuned) -> str:
    """Return the text of the file."""
    lines = ["# Written by `dynamix tune`; do not edit. Times in virtual seconds.", ""]
    about = ("command", "scenarios", "code", "seeds", "num_settings")
    lines += [f"{name} = {_value(getattr(tuned, name))}" for name in about]
    for family, choices in tuned.families.items():
        lines += _tables(f"families.{_value(family)}", choices)
    lines += _tables("overall", tuned.overall)
    return "\n".join(lines) + "\n"


def _tables(prefix: str, choices: dict[str, Choice]) -> list[str]:
    lines = []
    for policy, choice in choices.items():
        lines += ["", f"[{prefix}.{_value(policy)}]"]
        known = {name: value for name, value in msgspec.to_builtins(choice).items() if value is not None}
        lines += [f"{name} = {_value(value)}" for name, value in known.items()]
    return lines


def _value(value: object) -> str:
    """Return a TOML value: text, number, list or inline table; text and numbers are spelled as in JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_value(key)} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return msgspec.json.encode(value).decode()
