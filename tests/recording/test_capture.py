"""The file of a capture: intact it returns what was written; otherwise the error names the damaged byte."""

import bisect
import itertools
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support import capture_files, examples

from dynamix.recording import capture
from dynamix.recording.capture import (
    STREAMS,
    CaptureEnd,
    CaptureError,
    CaptureReader,
    CaptureWriter,
    CutOffError,
    Record,
    RecordMerge,
)

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


def frame(body: bytes, *, length: int | None = None) -> bytes:
    """A frame with the right checksum, whatever it holds: a forger can compute it, too."""
    return capture.FRAME.pack(capture.MARKER, len(body) if length is None else length, zlib.crc32(body)) + body


def packed(content: object) -> bytes:
    return frame(zlib.compress(msgspec.msgpack.encode(content)))


def frame_offsets(content: bytes) -> Iterator[int]:
    at = len(capture.PREAMBLE)
    while at < len(content):
        yield at
        at += capture.FRAME.size + capture.FRAME.unpack_from(content, at)[1]


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
    with CaptureReader(capture_files.write(tmp_path / "any.dxc", given_records, reason="stored")) as reader:
        assert reader.header == capture_files.header()
        assert list(reader) == given_records
        assert reader.end == CaptureEnd(reason="stored", num_records=len(content))


@given(data=st.data())
@FILES
def test_a_flipped_bit_is_found_and_all_before_it_is_good(tmp_path: Path, content: bytes, data: st.DataObject) -> None:
    _, *blocks = frame_offsets(content)
    place = data.draw(st.integers(blocks[0], len(content) - 1))
    damaged = bytearray(content)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "flipped.dxc"
    path.write_bytes(damaged)
    with CaptureReader(path) as reader:
        found = list(reader)
    hit = bisect.bisect_right(blocks, place) - 1
    assert found == sample()[:hit]
    assert reader.fault.offset == blocks[hit]
    assert f"at byte {blocks[hit]}: " in str(reader.fault)


@given(data=st.data())
@FILES
def test_a_truncated_file_is_detected_and_good_up_to_there(tmp_path: Path, content: bytes, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(content) - 1))
    found, error = read_all(tmp_path / "cut.dxc", content[:length])
    assert error is not None
    assert isinstance(error, CutOffError) == (length >= len(capture.PREAMBLE))
    num_whole = sum(at <= length for at in frame_offsets(content)) - 2  # but the header, and what is cut
    assert found == sample()[: max(0, num_whole)]


@given(st.binary(max_size=400))
@FILES
def test_arbitrary_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    for start in (b"", capture.MAGIC, capture.PREAMBLE):
        found, error = read_all(tmp_path / "foreign.dxc", start + content)
        assert error is not None
        assert found == []


def test_omitted_repeated_and_swapped_blocks_are_detected(tmp_path: Path, content: bytes) -> None:
    offsets = [0, *frame_offsets(content), len(content)]
    start, head, *parts = [content[at:end] for at, end in itertools.pairwise(offsets)]
    job, report, window, state, *rest = parts
    first = [job, report]
    for body in ([job, window, state, *rest], [*first, window, window, state, *rest], [*first, state, window, *rest]):
        _, error = read_all(tmp_path / "edited.dxc", start + head + b"".join(body))
        assert error is not None


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (frame(b"", length=1 << 30), "over the limit"),
        (frame(zlib.compress(bytes(50 << 20), 9)), "not one of at most"),
        (frame(b"no zlib"), "cannot be unpacked"),
        (frame(zlib.compress(bytes(9))[:-5]), "not one of at most"),
        (frame(zlib.compress(bytes(9)) + b"more"), "not one of at most"),
        (packed([["FEED", 1, 1, "s", "", 7]]), "Expected `bytes`, got `int`"),
        (packed([["FEED", 1, 1, "s", "", b""]] * 2), "FEED 1 comes after 1"),
        (packed({"type": "end", "reason": "ended", "num_records": 7}), "7 records were written, 0 are there"),
        (packed({"type": "end", "reason": "bored", "num_records": 0}), "Invalid enum value 'bored'"),
    ],
)
def test_a_malicious_block_is_refused_with_its_position(tmp_path: Path, block: bytes, reason: str) -> None:
    """Reading it takes less than 8 MB, whatever it claims."""
    start = capture.PREAMBLE + packed(capture_files.header())
    tracemalloc.start()
    try:
        _, error = read_all(tmp_path / "malicious.dxc", start + block)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert reason in str(error)
    assert error.offset == len(start)


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    _, error = read_all(tmp_path / "later.dxc", capture.MAGIC + b"\x09" + b"whatever")
    assert "another version of the format, this program reads 3" in str(error)


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
        assert error.num_records == number


# --- the common order of several streams ------------------------------------------------------------------------------


def one_of(stream: str, sequence: int, timestamp_ns: int) -> Record:
    return Record(stream, sequence, timestamp_ns, "s", "", b"")


def order(records: list[Record]) -> list[tuple[str, int]]:
    return [(one.stream, one.sequence) for one in records]


def test_earlier_records_come_first_and_equal_times_follow_the_stream_order() -> None:
    merge = RecordMerge()
    for one in (("ACTIONS", 1, 20), ("FEED", 5, 20), ("FEED", 9, 30), ("JOBS", 2, 20)):
        merge.add_record(one_of(*one))
    assert order(list(merge.pop_until(20))) == [("JOBS", 2), ("FEED", 5), ("ACTIONS", 1)]
    assert order(list(merge.pop_until())) == [("FEED", 9)]
    assert list(merge.pop_until()) == []


def test_a_clock_set_back_never_reorders_a_stream() -> None:
    merge = RecordMerge()
    for one in (("FEED", 1, 100), ("FEED", 2, 40), ("ACTIONS", 1, 50), ("FEED", 3, 120)):
        merge.add_record(one_of(*one))
    assert order(list(merge.pop_until())) == [("ACTIONS", 1), ("FEED", 1), ("FEED", 2), ("FEED", 3)]


@given(st.lists(st.tuples(st.sampled_from(("JOBS", "FEED", "ACTIONS")), st.integers(0, 30))), st.data())
def test_the_order_is_the_same_in_parts_and_at_once(steps: list[tuple[str, int]], data: st.DataObject) -> None:
    """For any sequence of times, if all records up to each time were added before."""
    now, stored = 0, []
    for sequence, (stream, wait_ns) in enumerate(steps, start=1):
        now += wait_ns
        stored.append(one_of(stream, sequence, now))
    at_once = RecordMerge()
    for one in stored:
        at_once.add_record(one)
    in_parts, found, taken = RecordMerge(), [], 0
    for frontier in sorted(data.draw(st.lists(st.integers(0, now + 1), max_size=5))):
        ahead = data.draw(st.integers(0, 3))
        due = sum(one.timestamp_ns <= frontier for one in stored)
        for one in stored[taken : due + ahead]:
            in_parts.add_record(one)
        taken = max(taken, min(len(stored), due + ahead))
        found += list(in_parts.pop_until(frontier))
    for one in stored[taken:]:
        in_parts.add_record(one)
    found += list(in_parts.pop_until())
    assert found == list(at_once.pop_until())
