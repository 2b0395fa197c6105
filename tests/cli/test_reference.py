"""docs/reference.md: every argument of every command and every setting, as the code has them."""

import re
from pathlib import Path

from docs.reference import document


def test_the_page_is_what_the_code_says_and_everything_has_a_meaning() -> None:
    page = document()
    assert (Path(__file__).parents[2] / "docs/reference.md").read_text() == page, (
        "run `python docs/reference.py > docs/reference.md`"
    )
    rows = re.findall(r"^\| (`.*`) \|(?: .* \|)? (.*) \|$", page, flags=re.MULTILINE)
    assert [name for name, meaning in rows if not meaning.partition("(default")[0].strip()] == []
