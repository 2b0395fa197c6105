from pathlib import Path

import pytest
from docs.subjects import document
from hypothesis import given
from hypothesis import strategies as st

from dynamix.schemas import subjects
from dynamix.schemas.subjects import KINDS

DOCS = Path(__file__).parents[2] / "docs" / "subjects.md"


def test_subjects_are_spelled_as_documented() -> None:
    assert subjects.of("action", "mnist-0a1b2c3d") == "dynamix.v1.action.mnist.0a1b2c3d"
    assert subjects.of("state", "j", subjects.ANY) == "dynamix.v1.state.j._.*"
    assert subjects.of("state", subjects.ANY, "node-a") == "dynamix.v1.state.*.*.node-a"
    assert subjects.of("live", "arbitrator", "node-a") == "dynamix.v1.live.arbitrator.node-a"


@pytest.mark.parametrize("token", ["", "a.b", "A", "a b", "*", ">", "x" * 64, "é", "a\n"])
def test_a_token_that_could_change_the_subject_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="cannot be part of a subject"):
        subjects.check_token(token)


@given(st.from_regex(r"[a-z0-9-]{1,63}", fullmatch=True), st.from_regex(r"[a-z0-9-]{1,63}", fullmatch=True))
def test_every_subject_is_parsed_back(job: str, node: str) -> None:
    assert subjects.parse(subjects.of("window", job, node)) == ("window", (job, node))
    assert subjects.parse(subjects.of("applied", job)) == ("applied", (job,))


def test_two_jobs_never_share_a_subject_and_the_runs_of_a_name_share_its_token() -> None:
    ids = ["a", "a-b", "a-b-c", "a-", "-a", "-", "a--b"]
    assert len({subjects.of("job", job) for job in ids}) == len(ids)
    assert [job for job in ids if subjects.of("job", job).split(".")[3] == "a"] == ["a", "a-b"]


@pytest.mark.parametrize(
    "subject",
    ["dynamix.v2.job.a.b", "dynamix.v1.job", "dynamix.v1.job.a", "dynamix.v1.job.a.b-c", "dynamix.v1.x.a", "$JS"],
)
def test_foreign_subjects_are_refused(subject: str) -> None:
    with pytest.raises(ValueError, match="subject"):
        subjects.parse(subject)


def test_each_kind_has_its_own_code_and_a_subject_of_its_own_tokens() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        if kind.name != "dead":
            assert set(kind.tokens) <= set(kind.struct.__struct_fields__)


def test_docs_subjects_is_what_the_table_generates() -> None:
    """When this fails: python docs/subjects.py > docs/subjects.md."""
    assert DOCS.read_text() == document()
