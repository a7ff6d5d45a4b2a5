import gzip
import hashlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_tpu.data.criteo import source
from recsys_tpu.data.criteo.source import LineStream, SourceError, expand_inputs, scan


def read_all(path, first, last, *, compressed=False, read_bytes=64):
    with path.open("rb") as file:
        stream = LineStream(str(path), file, compressed=compressed, read_bytes=read_bytes)
        blocks = list(stream.read(first, last))
    for (line, text), (next_line, _) in pairwise(blocks):
        assert next_line == line + text.count(b"\n")
    return blocks


@settings(deadline=None)
@given(
    lines=st.lists(st.binary(max_size=90).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"") + b"x")),
    line_end=st.sampled_from([b"\n", b"\r\n"]),
    blank=st.integers(0, 3),
    last_line_end=st.booleans(),
    compressed=st.booleans(),
    read_bytes=st.integers(8, 300),
    data=st.data(),
)
def test_any_range_of_lines_whatever_the_block_size(
    tmp_path_factory, lines, line_end, blank, last_line_end, compressed, read_bytes, data
):
    path = tmp_path_factory.mktemp("source") / "log"
    text = line_end.join(lines) + (line_end * (1 + blank) if last_line_end or blank else b"")
    path.write_bytes(gzip.compress(text) if compressed else text)
    if not lines:
        with pytest.raises(SourceError, match="line 1: the file has no rows"):
            scan(str(path))
        return
    scanned = scan(str(path))
    assert scanned.lines == len(lines)
    assert scanned.blank_lines_at_end == blank
    assert scanned.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    first = data.draw(st.integers(1, len(lines)))
    last = data.draw(st.integers(first, len(lines)))
    blocks = read_all(path, first, last, compressed=compressed, read_bytes=read_bytes)
    assert blocks[0][0] == first
    read = b"".join(text for _, text in blocks).replace(b"\r\n", b"\n")
    assert read == b"".join(line + b"\n" for line in lines[first - 1 : last])


def test_the_index_of_a_plain_file_points_at_its_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "INDEX_LINES", 7)
    path = tmp_path / "log"
    lines = [b"line %d" % number + b"." * (number % 11) for number in range(1, 101)]
    path.write_bytes(b"\n".join(lines))
    scanned = scan(str(path))
    assert scanned.offsets is not None
    assert len(scanned.offsets) == -(-100 // 7)
    for index, offset in enumerate(scanned.offsets):
        with path.open("rb") as file:
            file.seek(offset)
            assert file.readline().rstrip(b"\n") == lines[index * 7]


def test_gzip_of_several_members_is_read_whole(tmp_path):
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(b"a\nb\n") + gzip.compress(b"") + gzip.compress(b"c\n") + bytes(100))
    assert scan(str(path)).lines == 3
    assert scan(str(path)).offsets is None


@pytest.mark.parametrize("cut", [1, 8, 9, 200])
def test_truncated_gzip_names_file_and_line(tmp_path, cut):
    path = tmp_path / "day_0.gz"
    data = gzip.compress(b"".join(b"%032x\n" % (number**9) for number in range(1000)))
    path.write_bytes(data[:-cut])
    with pytest.raises(
        SourceError, match=r"day_0\.gz: line \d+: the gzip data ends too early.*download"
    ) as caught:
        scan(str(path))
    line = int(str(caught.value).split("line ")[1].split(":")[0])
    assert 950 < line <= 1001


def test_damaged_gzip_names_file_and_line(tmp_path):
    path = tmp_path / "day_0.gz"
    data = bytearray(gzip.compress(b"row\n" * 1000))
    data[-6] ^= 1  # the checksum
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"day_0\.gz: line \d+: damaged gzip data"):
        scan(str(path))


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", b"\r\n", gzip.compress(b"")],
    ids=["no bytes", "line ends", "a line end of two bytes", "an empty gzip member"],
)
def test_a_file_without_rows_is_an_error(tmp_path, content):
    path = tmp_path / "day_3"
    path.write_bytes(content)
    with pytest.raises(SourceError, match="day_3: line 1: the file has no rows"):
        scan(str(path))


def test_a_file_without_line_ends_is_not_read_into_memory(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(b"ok\n" + bytes(5_000_000))
    with pytest.raises(SourceError, match="binary: line 2: no row ends within"):
        scan(str(path))


def test_a_file_that_lost_lines_is_noticed(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"a\nb\n")
    with pytest.raises(SourceError, match="line 2 is the last, but 3 were counted"):
        read_all(path, 1, 3)


def test_inputs_are_in_numeric_order(tmp_path):
    for name in ("day_10", "day_2", "day_1"):
        (tmp_path / name).write_text("x\n")
    found = expand_inputs([str(tmp_path / "day_*")])
    assert [path.rsplit("/", 1)[1] for path in found] == ["day_1", "day_2", "day_10"]


def test_inputs_that_match_nothing_or_twice_are_errors(tmp_path):
    (tmp_path / "day_1").write_text("x\n")
    with pytest.raises(SourceError, match=r"nothing\*: no such file"):
        expand_inputs([str(tmp_path / "nothing*")])
    with pytest.raises(SourceError, match="day_1: given twice"):
        expand_inputs([str(tmp_path / "day_1"), str(tmp_path / "day_*")])
