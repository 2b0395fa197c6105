"""The documents: what they name exists, lines fit a screen, and a few words that puzzle readers are avoided."""

import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from dynamix.cli.main import command_names

ROOT = Path(__file__).parents[1]
MAIN_DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/architecture.md")
MADE_BY_COMMANDS = ("out/", ".venv", "/", "~")
HISTORY = "CHANGELOG.md"
"""What had another name once."""
MAX_WIDTH = 120

REFERENCE = "docs/reference.md"
"""All arguments of commands and all settings, held to the code by tests/cli/test_reference.py."""
AVOIDED = re.compile(r"\b(mend(s|ed|ing|able)?|anew|whoever|nobody|rivals?|sent again)\b", re.IGNORECASE)
ALLOWED = {"CHANGELOG.md": ("--rivals", "`mend`"), "tests/test_documents.py": ("AVOIDED", "ALLOWED")}
"""Lines that may have them: the former names of an option and of a field, and these lists."""


def tracked(*suffixes: str) -> list[str]:
    """The files of the repository that end so."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listing.splitlines() if name.endswith(suffixes) and (ROOT / name).is_file()]


def code_spans(text: str) -> Iterator[str]:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", prose)


def named_paths(text: str) -> set[str]:
    spans = {span for span in code_spans(text) if re.fullmatch(r"[\w.@-]+(/[\w.@-]+)*/?", span)}
    return {
        span
        for span in spans
        if ("/" in span or span.endswith((".md", ".toml", ".txt"))) and not re.fullmatch(r"[\d/.]+", span)
    }


def is_path(name: str, files: str) -> bool:
    """Whether a file or folder has this path, or this end of a path: `trainer/data/` is short for a longer one."""
    return f"/{name}" in files if name.endswith("/") else f"/{name}\n" in files or f"/{name}/" in files


def anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("document", MAIN_DOCUMENTS)
def test_every_path_that_is_named_exists(document: str) -> None:
    files = "".join(f"/{name}\n" for name in tracked(""))
    names = {name for name in named_paths((ROOT / document).read_text()) if not name.startswith(MADE_BY_COMMANDS)}
    assert [name for name in sorted(names) if not is_path(name, files)] == []


@pytest.mark.parametrize("document", tracked(".md"))
def test_every_link_leads_to_a_file_and_a_heading_that_exist(document: str) -> None:
    path = ROOT / document
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if link.startswith(("http", "nats:", "$")):
            continue
        target, _, fragment = link.partition("#")
        found = path if not target else path.parent / target
        assert found.exists(), link
        if fragment:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), flags=re.MULTILINE)
            assert fragment in map(anchor, headings), link


@pytest.mark.parametrize("document", sorted({*tracked(".md")} - {HISTORY}))
def test_every_module_and_command_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    for name in set(re.findall(r"python -m ([a-z_][\w.]*\w)", text)):
        spec = find_spec(name)
        assert spec is not None, name
        assert spec.submodule_search_locations is None or find_spec(f"{name}.__main__") is not None, name
    for name in set(re.findall(r"(?:`|^ *)dynamix ([a-z][a-z-]*)", text, flags=re.MULTILINE)):
        assert name in command_names(), f"dynamix {name}"


@pytest.mark.parametrize("document", sorted({*tracked(".md")} - {HISTORY}))
def test_every_variable_and_target_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    known = set(re.findall(r"^\| `(DYNAMIX_[A-Z_]+)` \|", (ROOT / REFERENCE).read_text(), flags=re.MULTILINE))
    prefixes = {name[: end.start() + 1] for name in known for end in re.finditer("_", name)}
    unknown = set(re.findall(r"DYNAMIX_[A-Z_]+", text)) - known - prefixes
    assert unknown == set(), f"for a new setting: python -m dynamix.cli.reference > {REFERENCE}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    typed = "\n".join(re.findall(r"^```.*?^```|^ {4}.*?$", text, flags=re.DOTALL | re.MULTILINE))
    made = {*re.findall(r"`make ([a-z][a-z-]*)", text), *re.findall(r"^ *make ([a-z][a-z-]*)", typed, re.MULTILINE)}
    assert made - targets == set()


@pytest.mark.parametrize("document", sorted({*tracked(".md")} - {HISTORY}))
def test_every_command_is_given_options_that_it_has(document: str) -> None:
    sections = re.split(
        r"^### dynamix ", (ROOT / REFERENCE).read_text().partition("\n## Settings")[0], flags=re.MULTILINE
    )
    options = {part.split()[0]: {"--help", *re.findall(r"--[a-z][a-z-]*", part)} for part in sections[1:]}
    assert set(options) == set(command_names())
    for name, rest in re.findall(r"\bdynamix ([a-z-]+)([^`|#;&\n]*)", (ROOT / document).read_text()):
        given = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest.partition(" -- ")[0]))
        assert given <= options.get(name, given), f"dynamix {name}"


@pytest.mark.parametrize("document", MAIN_DOCUMENTS)
def test_lines_are_at_most_120_wide(document: str) -> None:
    """But for tables, whose rows cannot be broken."""
    lines = enumerate((ROOT / document).read_text().splitlines(), 1)
    assert [number for number, line in lines if len(line) > MAX_WIDTH and not line.startswith("|")] == []


def test_words_that_puzzle_readers_are_avoided() -> None:
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in tracked(".md", ".py", ".toml", ".yml", ".yaml", ".conf", ".service")
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if AVOIDED.search(line) and not any(part in line for part in ALLOWED.get(name, ()))
    ]
    assert found == []
