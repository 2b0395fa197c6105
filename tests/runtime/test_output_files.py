"""Files for output: what may be there already, and that nothing is lost."""

import os
import socket
import stat
from pathlib import Path

import pytest
from tests.support.devices import device_in, identity

from dynamix.runtime.output_files import JSON, PNG, FileKind, RefusedOutputError, check, check_directory, whole, write

UNPRIVILEGED = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_missing_file_is_made_with_the_permissions_of_any_other(tmp_path: Path) -> None:
    write(tmp_path / "new", b"content")
    (tmp_path / "usual").touch()
    assert (tmp_path / "new").read_bytes() == b"content"
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert names(tmp_path) == ["new", "usual"]


def test_a_file_is_replaced_as_a_whole_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with path.open("rb") as reader:
        write(path, b"new")
        assert reader.read() == b"old"  # who reads the old one still does
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    write(path, b"secret", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to(target)
    for content in (b"first", b"second"):
        write(link, content)
        assert link.is_symlink()
        assert target.read_bytes() == content


def test_what_fails_half_way_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def draw_half() -> None:
        with whole(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        draw_half()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_directories_are_made_only_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "some" / "where" / "file"
    with pytest.raises(RefusedOutputError, match=r"there is no directory .*/some/where; make it first"):
        check(path)
    check(path, make_parents=True)
    assert names(tmp_path) == []
    write(path, b"content", make_parents=True)
    assert path.read_bytes() == b"content"
    with pytest.raises(RefusedOutputError, match="Not a directory"):
        check(path / "below", make_parents=True)


def test_only_a_regular_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("link").symlink_to(device := device_in(tmp_path))
    Path("circle").symlink_to("circle")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        before = identity(device), names(tmp_path)
        for name in (".", "fifo", "device", "link", "socket", "circle", "/dev/null"):
            for refused in (check, lambda path: write(path, b"content")):
                with pytest.raises(RefusedOutputError, match=r"name a(nother)? file"):
                    refused(Path(name))  # type: ignore[operator] # either is called so
    assert (identity(device), names(tmp_path)) == before


@pytest.mark.parametrize(
    ("kind", "ours"), [(JSON, b'{\n  "a": 1\n}\n'), (JSON, b"[]\n"), (PNG, b"\x89PNG\r\n\x1a\n...")]
)
def test_a_file_that_is_not_ours_is_replaced_by_force_only(tmp_path: Path, kind: FileKind, ours: bytes) -> None:
    path = tmp_path / "file"
    for content in (b"", ours):
        path.write_bytes(content)
        check(path, kind)
    for content in (b"import os\n", b'{"one": "document"}\n{"per": "line"}\n', b"\x00"):
        path.write_bytes(content)
        with pytest.raises(RefusedOutputError, match=r"file exists and is not a.*: name another file, or add --force"):
            check(path, kind)
        check(path, kind, force=True)
        assert path.read_bytes() == content


@UNPRIVILEGED
def test_what_this_user_may_not_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o444)
    (tmp_path / "closed").chmod(0o555)
    for path in (tmp_path / "file", tmp_path / "closed" / "file"):
        with pytest.raises(RefusedOutputError, match="cannot be written by this user"):
            check(path)
    with pytest.raises(RefusedOutputError, match="cannot be written by this user"):
        check_directory(tmp_path / "closed")
