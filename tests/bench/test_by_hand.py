"""The timed deployment types what deploy/README.md says, and notices where that says something else."""

import pytest
from bench.by_hand import DOCUMENT, adapted, blocks, script, steps
from bench.harness.command import BenchmarkError

TEXT = DOCUMENT.read_text()


def test_each_line_that_is_typed_of_the_documents_blocks_stands_there() -> None:
    """Word for word, but for the names that a user replaces."""
    typed = script(TEXT)
    for section in ("Certificates", "By hand", "Keys"):
        for line in blocks(TEXT, section)[0].splitlines():
            replaced = line.replace("DNS:$name", "IP:127.0.0.1").replace("--node NODE", "--node node-0")
            replaced = replaced.replace("tls://broker.example", "tls://127.0.0.1")
            replaced = replaced.replace("systemctl reload dynamix-nats", "kill -HUP $broker")
            assert replaced in typed


def test_the_steps_are_those_of_a_secured_deployment() -> None:
    found = dict(steps(TEXT))
    assert [*found][:3] == ["clone", "certificates", "environment, by pip"]
    assert "nats-tls.conf" in found["broker"]
    started = found["streams and services"]
    assert all(f"python -m dynamix.{service} &" in started for service in ("collector", "reward", "arbitrator"))
    assert "dynamix keys revoke trainer" in [*found.values()][-1]


def test_a_document_that_says_something_else_is_noticed() -> None:
    with pytest.raises(BenchmarkError, match="has no section 'Elsewhere'"):
        blocks(TEXT, "Elsewhere")
    with pytest.raises(BenchmarkError, match="has no 'systemctl reload' any more"):
        adapted("dynamix keys list", **{"systemctl reload": "kill"})
    with pytest.raises(BenchmarkError, match="has no 'export PATH' any more"):
        script(TEXT.replace("export PATH", "PATH"))


def test_blocks_are_those_of_their_section_without_indentation() -> None:
    text = "\n## One\n\ntext\n\n    a\n      b\n\n    c\n\nmore\n\n    d\n\n## Two\n\n    e\n"
    assert [block.rstrip() for block in blocks(text, "One")] == ["a\n  b\n\nc", "d"]
