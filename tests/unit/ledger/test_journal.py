"""The journal file: what comes back after a crash, wherever it cuts the file, and what is never believed."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import ForebayError
from forebay.ledger.journal import METERED, PREPAID, SEGMENT_HEAD, Frame, Journal, Record, frame_bytes, read_frames

ID = "0123456789abcdef" * 2


def left(journal: Journal) -> tuple[str, list[Frame], list[str]]:
    found = journal.leftover()
    assert found is not None
    return found.journal, list(found.frames()), found.damaged


tokens = st.integers(0, 1 << 53)
records = st.lists(
    st.tuples(st.sampled_from([0, 1, 2]), st.text(max_size=20), tokens, tokens, tokens, st.text(max_size=9)),
    min_size=1,
    max_size=5,
)
written = st.lists(records, max_size=6)


def frames(parts: list[list[Record]]) -> list[Frame]:
    return [Frame(number, 1_000 + number, part) for number, part in enumerate(parts, 1)]


def record(number: int, key: str = "k") -> Record:
    return (PREPAID, key, number, 10, number, "")


@settings(max_examples=60)
@given(written, st.data())
def test_any_cut_leaves_a_prefix(parts: list[list[Record]], data: st.DataObject) -> None:
    whole = frames(parts)
    text = b"".join(frame_bytes(frame) for frame in whole)
    cut = data.draw(st.integers(0, len(text)))
    ends = [0]
    for frame in whole:
        ends.append(ends[-1] + len(frame_bytes(frame)))
    survivors = sum(end <= cut for end in ends[1:])
    assert [frame for frame, _ in read_frames(text[:cut])] == whole[:survivors]


@given(written.filter(bool), st.data())
def test_no_changed_byte_is_believed(parts: list[list[Record]], data: st.DataObject) -> None:
    whole = frames(parts)
    text = bytearray(b"".join(frame_bytes(frame) for frame in whole))
    text[data.draw(st.integers(0, len(text) - 1))] ^= data.draw(st.integers(1, 255))
    read = [frame for frame, _ in read_frames(bytes(text))]
    assert len(read) < len(whole)
    assert read == whole[: len(read)]


@given(st.binary(max_size=200))
def test_noise_is_no_frame(noise: bytes) -> None:
    assert list(read_frames(noise)) == []


def test_a_frame_of_an_earlier_version_names_no_model() -> None:
    old: list[Any] = [(PREPAID, "k", 1, 10, 5), (METERED, "l", 2, 7, 3)]
    text = frame_bytes(Frame(1, 1_000, old)) + frame_bytes(Frame(2, 1_001, [record(3)]))
    assert [frame.records for frame, _ in read_frames(text)] == [[(*one, "") for one in old], [record(3)]]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "journal", segment_bytes=200)
    made.begin(ID)
    yield made
    made.end(remove=False)


def reopened(journal: Journal) -> Journal:
    journal.end(remove=False)
    return Journal(journal.folder)


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    assert first.leftover() is None
    first.begin(ID)
    assert [first.append([record(1), record(2)], 5), first.append([record(3)], 6)] == [1, 2]
    second = reopened(first)
    assert left(second) == (ID, [Frame(1, 5, [record(1), record(2)]), Frame(2, 6, [record(3)])], [])
    second.clear(keep_damaged=False)
    assert second.leftover() is None
    second.end(remove=True)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_segments_follow_each_other_and_go_when_they_are_posted(journal: Journal) -> None:
    for number in range(1, 31):
        if journal.full:
            journal.turn()
        journal.append([record(number)], number)
    paths = sorted(journal.folder.glob("*.journal"))
    assert len(paths) > 3
    assert journal.size == sum(path.stat().st_size for path in paths)
    journal.posted(12)
    rest = sorted(journal.folder.glob("*.journal"))
    assert journal.size == sum(path.stat().st_size for path in rest)
    _, read, damaged = left(journal)
    assert damaged == []
    numbers = [frame.number for frame in read]
    assert numbers == list(range(numbers[0], 31))
    assert 1 < numbers[0] <= 13
    journal.posted(30)
    assert len(list(journal.folder.glob("*.journal"))) == 1


def test_a_segment_goes_only_when_the_next_one_says_what_is_under_way(journal: Journal) -> None:
    journal.append([(METERED, "k", 1, 10, 5, "")], 1)
    journal.turn()
    journal.posted(1)
    assert len(list(journal.folder.glob("*.journal"))) == 2
    journal.append([(METERED, "k", 1, 10, 6, "")], 2)
    journal.posted(1)
    assert len(list(journal.folder.glob("*.journal"))) == 1


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_cut_of_the_last_segment_is_recovered(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    journal = Journal(folder, segment_bytes=150)
    journal.begin(ID)
    for number in range(1, 8):
        if journal.full:
            journal.turn()
        journal.append([record(number)], number)
    journal.end(remove=False)
    last = max(folder.glob("*.journal"))
    os.truncate(last, data.draw(st.integers(0, last.stat().st_size)))
    again = Journal(folder)
    _, read, damaged = left(again)
    again.end(remove=False)
    assert damaged == []
    assert read == [Frame(n, n, [record(n)]) for n in range(1, len(read) + 1)]


def test_damage_in_the_middle_is_said_and_put_aside(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(ID)
    for number in range(1, 4):
        journal.append([record(number)], number)
    path = next(tmp_path.glob("*.journal"))
    text = bytearray(path.read_bytes())
    text[SEGMENT_HEAD.size + len(frame_bytes(Frame(1, 1, [record(1)]))) + 30] ^= 1
    path.write_bytes(text)
    again = reopened(journal)
    _, read, damaged = left(again)
    assert [frame.number for frame in read] == [1]
    assert "and more follows" in damaged[0]
    again.clear(keep_damaged=True)
    assert again.leftover() is None
    assert len(list(tmp_path.glob("*.damaged"))) == 1
    again.end(remove=False)


def test_a_missing_segment_is_said(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=1)
    journal.begin(ID)
    for number in range(1, 5):
        journal.turn()
        journal.append([record(number)], number)
    sorted(tmp_path.glob("*.journal"))[2].unlink()
    again = reopened(journal)
    _, _, damaged = left(again)
    again.end(remove=False)
    assert any("goes on with frame 3 after 1" in text for text in damaged)


def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    with pytest.raises(ForebayError, match="belongs to another gateway that runs"):
        Journal(tmp_path)
    first.end(remove=False)
    Journal(tmp_path).end(remove=False)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ForebayError, match=r"cannot be opened: Not a directory.*\[ledger\] journal"):
        Journal(tmp_path / "file" / "journal")


def test_a_full_disk_leaves_whole_frames(tmp_path: Path) -> None:
    """The limit on the size of a file is as hard as the end of a disk, and cuts a write in the middle."""
    journal = Journal(tmp_path)
    journal.begin(uuid4().hex)
    journal.append([record(1)], 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size + 50, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            journal.append([record(2, "a key with a long name" * 5)], 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert journal.append([record(3)], 3) == 2
    again = reopened(journal)
    _, read, damaged = left(again)
    again.end(remove=False)
    assert (read, damaged) == ([Frame(1, 1, [record(1)]), Frame(2, 3, [record(3)])], [])
