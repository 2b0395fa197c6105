"""Objects of other packages, found by their entry points."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.extensions import register

from dynamix.runtime.extensions import ExtensionError, extension_names, load_extension

POLICIES = "dynamix.policies"


def as_it_is(target: Any) -> Any:
    return target


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("example_extension")
def test_all_groups_of_an_installed_package_are_found() -> None:
    assert "halving" in extension_names(POLICIES)
    assert "example" in extension_names("dynamix.loggers")
    assert {"coarse", "reversed"} <= set(extension_names("dynamix.codecs"))
    assert load_extension(POLICIES, "halving", as_it_is).version == 3
    assert load_extension(POLICIES, "thirding", as_it_is) is None
    assert load_extension("dynamix.loggers", "halving", as_it_is) is None


def test_a_name_of_two_packages_is_refused_and_the_others_still_load(path: Path) -> None:
    register(path, "one", POLICIES, shared="builtins:dict", own="builtins:list")
    register(path, "two", POLICIES, shared="builtins:set")
    with pytest.raises(ExtensionError, match=r"'shared' .* registered by one 1.0, two 1.0: uninstall all but one"):
        load_extension(POLICIES, "shared", as_it_is)
    assert load_extension(POLICIES, "own", as_it_is) == []


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("class Broken:\n    def __init__(self, needed): ...", "TypeError: .*'needed'"),
        ("class Broken(BaseException): ...", "TypeError: it has no decide"),
    ],
)
def test_a_broken_package_is_reported_in_one_sentence(
    path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    def refuse(_: Any) -> Any:
        raise TypeError("it has no decide")

    monkeypatch.delitem(sys.modules, "broken_package", raising=False)
    (path / "broken_package.py").write_text(source)
    register(path, "their-package", POLICIES, broken="broken_package:Broken")
    with pytest.raises(ExtensionError, match=reason) as raised:
        load_extension(POLICIES, "broken", refuse)
    text = str(raised.value)
    assert text.startswith(
        "their-package 1.0 registers 'broken' in 'dynamix.policies' as 'broken_package:Broken', which"
    )
    assert text.endswith("; fix the package or uninstall it")
    assert "\n" not in text


def test_importing_dynamix_imports_no_extension(example_extension: Path) -> None:
    code = "import sys, dynamix.arbitrator.service, dynamix.trainer; print('example_extension' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{example_extension}:{':'.join(filter(None, sys.path))}"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["False"]
