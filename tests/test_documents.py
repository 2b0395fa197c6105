"""The documents: links, commands and options that they name exist."""

import re
import subprocess
from pathlib import Path

import pytest
from docs import report
from docs.reference import document

from dynamix.cli.main import command_names

ROOT = Path(__file__).parents[1]
REFERENCE = "docs/reference.md"
"""All arguments of commands and all settings."""
HISTORY = "CHANGELOG.md"
"""What had another name once."""


def tracked(*suffixes: str) -> list[str]:
    """The files of the repository that end so."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listing.splitlines() if name.endswith(suffixes) and (ROOT / name).is_file()]


def anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


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
def test_every_command_option_setting_and_target_that_is_named_exists(document: str) -> None:
    text, reference = (ROOT / document).read_text(), (ROOT / REFERENCE).read_text()
    for name in set(re.findall(r"(?:`|^ *)dynamix ([a-z][a-z-]*)", text, flags=re.MULTILINE)):
        assert name in command_names(), f"dynamix {name}"
    sections = re.split(r"^### dynamix ", reference.partition("\n## Settings")[0], flags=re.MULTILINE)
    options = {part.split()[0]: {"--help", *re.findall(r"--[a-z][a-z-]*", part)} for part in sections[1:]}
    for name, rest in re.findall(r"\bdynamix ([a-z-]+)([^`|#;&\n]*)", text):
        given = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest.partition(" -- ")[0]))
        assert given <= options.get(name, given), f"dynamix {name}"
    known = set(re.findall(r"^\| `(DYNAMIX_[A-Z_]+)` \|", reference, flags=re.MULTILINE))
    prefixes = {name[: end.start() + 1] for name in known for end in re.finditer("_", name)}
    assert set(re.findall(r"DYNAMIX_[A-Z_]+", text)) - known - prefixes == set()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {*re.findall(r"`make ([a-z][a-z-]*)", text)} - targets == set()


def test_every_message_of_the_index_of_errors_is_in_the_code() -> None:
    files = [ROOT / name for name in tracked(".py") if name.startswith("services/trainer/")]
    said = "".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in files)
    messages = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/guides/errors.md").read_text(), flags=re.MULTILINE)
    assert [message for message in messages if message not in said] == []


def test_the_page_is_what_the_code_says_and_everything_has_a_meaning() -> None:
    page = document()
    assert (ROOT / REFERENCE).read_text() == page, "run `python docs/reference.py > docs/reference.md`"
    rows = re.findall(r"^\| (`.*`) \|(?: .* \|)? (.*) \|$", page, flags=re.MULTILINE)
    assert [name for name, meaning in rows if not meaning.partition("(default")[0].strip()] == []


def test_the_report_and_its_figures_show_what_the_tables_have() -> None:
    assert [path.name for path in report.PAGES if path.read_text() != report.page(path)] == [], "run `make report`"
    drawn = {name: (report.RESULTS / f"report-{name}.svg").read_text() for name in report.figures()}
    assert [name for name, one in report.figures().items() if one.digest not in drawn[name]] == [], "run `make report`"
