"""The code of README and of the guides, run as it stands there."""

from pathlib import Path

import pytest
from tests.support.guides import GUIDES, ROOT, blocks, run_page
from tests.support.ranks import run_ranks

PAGES = [ROOT / "README.md", *sorted(GUIDES.glob("*.md"))]


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page)) and page.stem != "frameworks"], ids=str)
def test_each_block_of_code_of_a_page_trains(page: Path, tmp_path: Path) -> None:
    (places,) = run_ranks(run_page, 1, page, str(tmp_path))
    assert places
