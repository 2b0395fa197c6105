"""The file of a capture: intact it returns what was written; otherwise the error names block and byte."""

import bisect
import hashlib
import itertools
import json
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support import capture_files, examples

from dynamix.recording import capture
from dynamix.recording.capture import CaptureError, CaptureReader, CaptureWriter, CutOffError, Record
from dynamix.recording.capture import file as layout
from dynamix.recording.capture.record import STREAMS

NUM_BLOCKS = 5
FILES = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def sample() -> list[Record]:
    """Records of all four streams."""
    messages = [examples.job(), examples.report(), examples.window(), examples.state(), examples.action(hash=bytes(32))]
    return capture_files.records_of(messages)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A complete capture with a block for each record."""
    path = tmp_path_factory.mktemp("capture") / "job.dxc"
    with CaptureWriter(path, capture_files.header()) as writer:
        for one in sample():
            writer.write_record(one)
            writer.flush()
    return path.read_bytes()


def frame(kind: bytes, body: bytes, *, length: int | None = None, index: int = 1) -> bytes:
    return layout.FRAME.pack(layout.MARKER, kind, index, len(body) if length is None else length) + body


def file_of(*frames: bytes) -> bytes:
    """A file with right digests, whatever its frames hold: a forger can compute them, too."""
    data, seed = layout.PREAMBLE, layout.PREAMBLE
    for index, one in enumerate(frames):
        digest = hashlib.sha256(seed + one).digest()
        data += one + digest
        seed = seed if index else digest
    return data


def a_header(index: int = 0, **changes: Any) -> bytes:
    fields = {"job": examples.JOB, "created": "2026-11-20T12:00:00Z", "streams": ["JOBS", "FEED", "ACTIONS"]}
    fields["fingerprint"] = {"simd": [], **dict.fromkeys(("dynamix", "code", "python", "numpy", "machine", "cpu"), "x")}
    return frame(layout.HEADER, json.dumps(fields | changes).encode(), index=index)


def a_block(*packed: bytes, index: int = 1) -> bytes:
    return frame(layout.BLOCK, zlib.compress(b"".join(packed)), index=index)


def an_end(num_records: int = 0, index: int = 1) -> bytes:
    body = {"reason": "ended", "num_records": num_records, "ranges": {}}
    return frame(layout.END, json.dumps(body).encode(), index=index)


def read_all(path: Path, content: bytes) -> tuple[list[Record], CaptureError | None]:
    """The records before the end or the error, and the error."""
    path.write_bytes(content)
    found: list[Record] = []
    try:
        for one in capture.records(path):
            found.append(one)  # noqa: PERF402 - what came before an error counts
    except CaptureError as error:
        return found, error
    return found, None


def test_written_records_are_read_back(tmp_path: Path) -> None:
    path = capture_files.write(tmp_path / "job.dxc", sample(), reason="windows")
    assert capture.read_header(path) == capture_files.header()
    with CaptureReader(path) as reader:
        assert reader.end is None
        assert list(reader) == sample()
        assert reader.end is not None
        assert reader.end.reason == "windows"
        assert reader.end.num_records == reader.num_records == 5
        feed = reader.end.ranges["FEED"]
        assert (feed.first_sequence, feed.last_sequence, feed.num_records) == (3, 4, 2)


@given(
    st.lists(
        st.tuples(st.sampled_from(STREAMS), st.text(max_size=40), st.binary(max_size=2000)),
        max_size=40,
    )
)
@FILES
def test_arbitrary_records_are_read_back(tmp_path: Path, content: list[tuple[str, str, bytes]]) -> None:
    given_records = [
        Record(stream, sequence, sequence * 7, f"a.{name}", name, payload)
        for sequence, (stream, name, payload) in enumerate(content, start=1)
    ]
    path = tmp_path / "any.dxc"
    path.unlink(missing_ok=True)
    assert list(capture.records(capture_files.write(path, given_records))) == given_records


def frame_offsets(content: bytes) -> Iterator[int]:
    at = len(layout.PREAMBLE)
    while at < len(content):
        yield at
        at += layout.FRAME.size + layout.FRAME.unpack_from(content, at)[3] + layout.DIGEST_BYTES


@given(data=st.data())
@FILES
def test_a_flipped_bit_loses_its_own_block_only(tmp_path: Path, content: bytes, data: st.DataObject) -> None:
    _, *blocks = frame_offsets(content)
    place = data.draw(st.integers(blocks[0], len(content) - 1))
    damaged = bytearray(content)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "flipped.dxc"
    path.write_bytes(damaged)
    with CaptureReader(path) as reader:
        found = list(reader.good_records())
    hit = bisect.bisect_right(blocks, place) - 1
    assert found == [one for index, one in enumerate(sample()) if index != hit]
    assert reader.faults[0].block == hit + 1
    assert len(reader.faults) == (1 if hit < NUM_BLOCKS else 2)  # without its end the file is cut off, too


@given(data=st.data())
@FILES
def test_a_truncated_file_is_detected_and_good_up_to_there(tmp_path: Path, content: bytes, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(content) - 1))
    found, error = read_all(tmp_path / "cut.dxc", content[:length])
    assert error is not None
    assert isinstance(error, CutOffError) == (length >= len(layout.PREAMBLE))
    whole_blocks = [at for at in frame_offsets(content) if at <= length]
    assert found == sample()[: len(found)]
    if len(whole_blocks) == NUM_BLOCKS + 2:  # only the end is missing
        assert found == sample()


@given(st.binary(max_size=400))
@FILES
def test_arbitrary_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    for start in (b"", layout.MAGIC, layout.PREAMBLE):
        found, error = read_all(tmp_path / "foreign.dxc", start + content)
        assert error is not None
        assert found == []


def test_omitted_repeated_swapped_and_foreign_blocks_are_detected(tmp_path: Path, content: bytes) -> None:
    offsets = [*frame_offsets(content), len(content)]
    head, first, second, *rest = [content[at:end] for at, end in itertools.pairwise(offsets)]
    start = content[: offsets[0]] + head
    other = capture_files.write(tmp_path / "other.dxc", sample(), job="other-0a1b2c3d").read_bytes()
    foreign = other[slice(*list(frame_offsets(other))[1:3])]
    for body in ([second, *rest], [first, first, second, *rest], [second, first, *rest], [foreign, second, *rest]):
        found, error = read_all(tmp_path / "edited.dxc", start + b"".join(body))
        assert found == sample()[: len(found)]
        assert error is not None


def packed(**changes: int) -> bytes:
    """A record whose head has the given values."""
    fields = {"stream": 1, "subject": 1, "message_id": 0, "payload": 1, "sequence": 1, "timestamp_ns": 1}
    return layout.RECORD.pack(*(fields | changes).values()) + b"sp"


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (frame(layout.BLOCK, b"", length=1 << 30), "over the limit"),
        (frame(layout.BLOCK, zlib.compress(bytes(50 << 20), 9)), "or larger than the"),
        (frame(layout.BLOCK, b"no zlib"), "cannot be unpacked"),
        (frame(layout.BLOCK, zlib.compress(packed())[:-5]), "cut off, or larger"),
        (frame(layout.BLOCK, zlib.compress(packed()) + b"more"), "4 bytes follow its content"),
        (a_block(packed(payload=(1 << 32) - 1)), "its last record is cut off"),
        (a_block(packed(subject=255)), "its last record is cut off"),
        (a_block(packed(), b"\0\0\0"), "its last record is cut off"),
        (a_block(packed(stream=3)), "a record is of stream 3, but the header names 3"),
        (a_block(packed(), packed()), "FEED 1 comes after 1"),
        (a_block(packed(subject=0, message_id=1).replace(b"sp", b"\xffp")), "invalid start byte"),
        (an_end(7), "declares 7 records, 0 are there"),
        (frame(layout.END, b'{"reason": "bored", "num_records": 0, "ranges": {}}'), "not a CaptureEnd"),
    ],
)
def test_a_malicious_block_is_refused_with_its_position(tmp_path: Path, block: bytes, reason: str) -> None:
    error = refusal(tmp_path, file_of(a_header(), block))
    assert reason in str(error)
    assert error.block == 1
    assert error.offset == len(file_of(a_header()))
    assert f"block 1 (byte {error.offset})" in str(error)


def refusal(tmp_path: Path, content: bytes) -> CaptureError:
    """How a file is refused; reading it takes less than 8 MB, whatever it claims."""
    path = tmp_path / "malicious.dxc"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CaptureError) as caught:
            list(capture.records(path))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    return caught.value


def test_another_format_version_is_named_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "later.dxc"
    path.write_bytes(layout.MAGIC + b"\x09" + b"whatever")
    with pytest.raises(CaptureError, match="a capture of version 9, this program reads 2"):
        capture.read_header(path)


def test_records_flushed_by_a_killed_writer_are_readable(tmp_path: Path) -> None:
    path = tmp_path / "job.dxc"
    flushed = b""

    def interrupted() -> None:
        nonlocal flushed
        with CaptureWriter(path, capture_files.header()) as writer:
            writer.write_record(sample()[0])
            writer.flush()
            flushed = path.read_bytes()  # what a kill -9 would leave here
            writer.write_record(sample()[1])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    for content, number in ((flushed, 1), (path.read_bytes(), 2)):
        found, error = read_all(tmp_path / "left.dxc", content)
        assert found == sample()[:number]
        assert isinstance(error, CutOffError)
        assert f"the {number} records before it are good" in str(error)


def test_an_existing_capture_is_not_overwritten(tmp_path: Path) -> None:
    path = capture_files.write(tmp_path / "job.dxc", sample())
    with pytest.raises(FileExistsError), CaptureWriter(path, capture_files.header()):
        pass
    assert list(capture.records(path)) == sample()
    with CaptureWriter(path, capture_files.header(), overwrite=True) as writer:
        writer.write_record(sample()[0])
    assert list(capture.records(path)) == sample()[:1]


def test_records_out_of_order_or_of_an_unknown_stream_are_refused(tmp_path: Path) -> None:
    first, second, *_ = sample()
    with CaptureWriter(tmp_path / "job.dxc", capture_files.header()) as writer:
        writer.write_record(second)
        with pytest.raises(ValueError, match="REPORTS 2 comes after 2: not in order"):
            writer.write_record(second)
        with pytest.raises(ValueError, match="stream 'DEAD' is not in the header"):
            writer.write_record(first._replace(stream="DEAD"))
        for too_large in ({"payload": bytes((1 << 20) + 1)}, {"subject": "s" * 256}, {"message_id": "i" * 1025}):
            writer.write_record(second._replace(sequence=9, **too_large))  # type: ignore[arg-type] # one of three
        assert writer.finish().num_left_out == 3
    assert list(capture.records(tmp_path / "job.dxc")) == [second]


def test_the_layout_of_a_record_is_as_documented() -> None:
    one = Record("FEED", 0x0102030405060708, 0x1112131415161718, "sub", "id", b"payload")
    packed = struct.pack("<BBHIQQ", 1, 3, 2, 7, one.sequence, one.timestamp_ns) + b"subidpayload"
    assert layout.pack(one, 1) == packed
    assert layout.unpack(packed, ("JOBS", "FEED")) == [one]


def test_fingerprint_differences_are_listed_by_name() -> None:
    ours = capture.fingerprint()
    assert ours.code != "0" * 64
    assert capture.differences(ours, ours) == []
    found = capture.differences(capture_files.FINGERPRINT, ours)
    assert f"code: {'0' * 16}... there, {ours.code[:16]}... here" in found
    assert capture.fingerprint() == ours
