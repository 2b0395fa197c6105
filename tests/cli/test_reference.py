"""docs/reference.md: every argument of every command and every setting, as the code has them."""

import re
from pathlib import Path

import pytest

from dynamix.cli.main import COMMANDS
from dynamix.cli.reference.__main__ import document
from dynamix.cli.reference.commands import command_section
from dynamix.cli.reference.settings import OWNERS, settings_section

PAGE = Path(__file__).parents[2] / "docs/reference.md"


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == document(), "run `python -m dynamix.cli.reference > docs/reference.md`"


@pytest.mark.parametrize(
    "section",
    [*(command_section(name) for name in COMMANDS), *(settings_section(owner) for owner in OWNERS)],
    ids=[*COMMANDS, *(owner.component or "shared" for owner in OWNERS)],
)
def test_everything_that_can_be_given_has_a_meaning(section: str) -> None:
    rows = re.findall(r"^\| (`.*`) \|(?: .* \|)? (.*) \|$", section, flags=re.MULTILINE)
    assert rows or "Provision" in section
    assert [name for name, meaning in rows if not meaning.partition("(default")[0].strip()] == []


def test_an_argument_is_spelled_as_it_is_typed() -> None:
    rows = command_section("capture").splitlines()
    assert "| `JOB` | the job's id, or how it begins if that is one job |" in rows
    assert "| `-o, --output FILE` | where to write the capture |" in rows
    assert "| `--force` | overwrite FILE |" in rows
    row = r"| `--format parquet\|csv\|jsonl` | default: by the ending of the file, else csv |"
    assert row in command_section("export").splitlines()
