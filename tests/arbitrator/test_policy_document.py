from pathlib import Path

from dynamix.arbitrator.document import document
from dynamix.arbitrator.policies.registry import POLICIES

PATH = Path(__file__).parents[2] / "docs" / "policies.md"


def test_the_document_is_up_to_date() -> None:
    assert PATH.read_text() == document(), "run: python -m dynamix.arbitrator.document > docs/policies.md"


def test_every_option_of_every_policy_is_in_it() -> None:
    sections = {section.split("\n")[0]: section for section in document().split("\n## ")}
    for name, policy in POLICIES.items():
        assert all(f"`{option}`" in sections[name] for option in policy.options if option != "track")
