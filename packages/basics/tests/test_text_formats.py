"""Text files of `data=text`: JSON lines, compressed files, binary and damaged files."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma

import numpy as np
import pytest

from gangline.config.defaults import build_default_run
from gangline.errors import UserError
from gangline_basics.data.config import TextConfig
from gangline_basics.data.formats import read, read_lines
from gangline_basics.data.text import build

TEXTS = [f"line {number} of a corpus\nwith naïve prose\n" for number in range(200)]
LINES = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(TEXTS)).encode()
PLAIN = "".join(TEXTS).encode()


def source(data: TextConfig, split: str = "train"):
    return build(data, build_default_run(data=data), split)


def problems(data: TextConfig) -> str:
    return str(UserError.of(data.check(build_default_run(data=data))))


def text_of(found) -> str:
    return found.tokens.tobytes().decode()


@pytest.mark.parametrize(
    ("ending", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress), ("XZ", lzma.compress)]
)
def test_compressed_file_reads_as_plain_text(tmp_path, ending, compress):
    (tmp_path / "a.txt").write_bytes(PLAIN)
    (tmp_path / f"b.txt.{ending}").write_bytes(compress(PLAIN))
    plain, packed = TextConfig(path=str(tmp_path / "a.txt")), TextConfig(path=str(tmp_path / f"b.txt.{ending}"))
    assert packed.check(build_default_run(data=packed)) == []
    whole = [text_of(source(packed, split)).rstrip("\0") for split in ("train", "validation")]
    assert "".join(whole) == PLAIN.decode()
    assert 0.5 < len(whole[1]) / len(text_of(source(plain, "validation"))) < 2  # splits count stored bytes


def test_json_lines_are_documents(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    data = TextConfig(path=str(tmp_path / "a.jsonl"), document_masking=True, validation_fraction=0.1)
    assert data.check(build_default_run(data=data)) == []
    train, held_out = source(data), source(data, "validation")
    both = text_of(train) + text_of(held_out)
    assert both.split("\0")[:-1] == TEXTS  # in order, each document in one split
    assert len(train.starts) == pytest.approx(180, abs=2)
    assert train.describe().startswith(f"{len(train.starts)} documents, ")
    assert int(np.diff(train.starts).min()) == len(TEXTS[0].encode()) + 1
    packed = source(TextConfig(path=str(tmp_path / "a.jsonl.gz"), document_masking=True, validation_fraction=0.0))
    assert text_of(packed).split("\0")[:-1] == TEXTS


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"body": "a", "id": 3}', ["the field 'text' of line 2 of", " is missing.", "Fields of the line: body, id."]),
        ('{"body": "a", "id": 3}', ["To read another field:  data.text_field=body"]),
        ('{"text": 3}', ["line 2", "the field 'text' of line 2 of", "is not a text.", "Fields of the line: text."]),
        ("[1]", ["line 2", "is not a JSON object."]),
        ("nonsense", ["line 2", "is not JSON."]),
    ],
)  # fmt: skip
def test_json_line_without_text_is_refused(tmp_path, line, said):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "fine"}}\n{line}\n')
    found = problems(TextConfig(path=str(tmp_path / "a.jsonl")))
    for words in said:
        assert words in found
    with pytest.raises(UserError, match="line 2"):
        source(TextConfig(path=str(tmp_path / "a.jsonl"), validation_fraction=0.0))


def test_text_field_option_selects_json_field(tmp_path):
    (tmp_path / "a.ndjson").write_bytes(LINES.replace(b'"text"', b'"content"'))
    named = TextConfig(path=str(tmp_path / "a.ndjson"), text_field="content", validation_fraction=0.0)
    assert text_of(source(named)).split("\0")[:-1] == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.bin", bytes(range(256)) * 20, "NUL bytes"),
        ("a.txt", "wide".encode("utf-16") * 500, "NUL bytes"),
        ("a.txt", bytes(range(128, 256)) * 20, "bytes that are not UTF-8"),
        ("a.gz", gzip.compress(bytes(2000), mtime=0), "NUL bytes"),
    ],
)
def test_binary_file_is_refused(tmp_path, name, content, why):
    (tmp_path / name).write_bytes(content)
    found = problems(TextConfig(path=str(tmp_path / name)))
    assert "does not look like text." in found
    assert why in found
    assert "data.binary=true" in found
    forced = TextConfig(path=str(tmp_path / name), binary=True, validation_fraction=0.0)
    assert len(source(forced).tokens) > 2000


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(PLAIN)[:-40])
    (tmp_path / "b.txt.xz").write_bytes(PLAIN)
    for name in ("a.txt.gz", "b.txt.xz"):
        with pytest.raises(UserError, match="is damaged, or its format differs from its extension"):
            source(TextConfig(path=str(tmp_path / name)))


STREAMS = {"bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("ending", STREAMS)
def test_concatenated_compressed_streams_are_one_text(tmp_path, ending):
    """Check xz with more padding between streams than one read returns, and a stream that expands a thousandfold."""
    between = bytes(1 << 15) if ending == "xz" else b""
    parts = [PLAIN, b"", b"x" * 3_000_000, PLAIN]
    path = tmp_path / f"a.txt.{ending}"
    path.write_bytes(between.join(map(STREAMS[ending], parts)) + between)
    assert read(str(path)) == b"".join(parts)


@pytest.mark.parametrize("ending", STREAMS)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "text", "zeros"])
def test_damage_after_first_stream_is_refused(tmp_path, ending, damage):
    stream = STREAMS[ending](LINES)
    path = tmp_path / f"a.jsonl.{ending}"
    behind = {
        "flipped": bytes([stream[0] ^ 1]) + stream[1:] + stream,
        "truncated": stream + stream[:-1],
        "text": b"and so on\n",
        "zeros": bytes(6),  # padding of xz is a multiple of four bytes
    }
    path.write_bytes(stream + behind[damage])
    with pytest.raises(UserError, match=rf"{ending} (is damaged|cannot be read)"):
        source(TextConfig(path=str(path), validation_fraction=0.0))


@pytest.mark.parametrize("ending", ["bz2", "xz", "zst"])
def test_empty_compressed_file_is_refused(tmp_path, ending):
    if ending == "zst":
        pytest.importorskip("zstandard")
    (tmp_path / f"a.txt.{ending}").write_bytes(b"")
    with pytest.raises(UserError, match="is damaged"):
        read(str(tmp_path / f"a.txt.{ending}"))


@pytest.fixture
def zstd():
    """Compressor of Zstandard frames without a content size, as in streams."""
    return pytest.importorskip("zstandard").ZstdCompressor(level=1, write_content_size=False).compress


def test_zstandard_frames_are_one_text(tmp_path, zstd):
    """Check also an empty frame, and a skippable frame larger than one read."""
    noise = np.random.default_rng(0).integers(32, 127, 1 << 19, dtype=np.uint8).tobytes()
    skipped = (0x184D2A50).to_bytes(4, "little") + (1 << 17).to_bytes(4, "little") + bytes(1 << 17)
    parts = [zstd(b"x" * 5_000_000), zstd(b""), skipped, zstd(noise), skipped]
    (tmp_path / "a.txt.zst").write_bytes(b"".join(parts))
    assert read(str(tmp_path / "a.txt.zst")) == b"x" * 5_000_000 + noise
    assert read(str(tmp_path / "a.txt.zst"), 5_000_010) == b"x" * 5_000_000 + noise[:10]


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("of_last", [0.001, 0.5, 0.999])
@pytest.mark.parametrize("frames", [1, 10])
def test_truncated_zstandard_is_refused(tmp_path, zstd, lines, of_last, frames):
    """Check also truncation between two lines, where the rest of the text is valid JSON."""
    path = tmp_path / ("a.jsonl.zst" if lines else "a.txt.zst")
    *before, last = [zstd(LINES if lines else PLAIN)] * frames
    path.write_bytes(b"".join(before) + last[: max(1, int(of_last * len(last)))])
    with pytest.raises(UserError, match=r"zst is damaged(.*\n)*.*last stream"):
        source(TextConfig(path=str(path), validation_fraction=0.0))


def test_missing_zstandard_is_reported(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(PLAIN)
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    assert "pip install zstandard" in problems(TextConfig(path=str(tmp_path)))


@pytest.mark.parametrize("cut", range(1, 17))
def test_split_keeps_lines_complete(cut):
    content = b"one\ntwo\nthree\nfour"
    (train, _), (held_out, number) = read_lines(content, cut, False), read_lines(content, cut, True)
    assert train + held_out == content
    assert held_out
    assert number == 1 + train.count(b"\n")
    assert not train or train.endswith(b"\n")
