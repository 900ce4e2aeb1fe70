"""Damage of JPEG and PNG files that their structure reveals.

test_images.py tests runs that read damaged images.
"""

from __future__ import annotations

import io

import numpy as np
import pytest

from gangline_dataloader.images.structure import find_damage

Image = pytest.importorskip("PIL.Image", reason="the images of this test are written by Pillow")

WAYS = {
    "default": {},
    "progressive": {"progressive": True},
    "optimized": {"optimize": True},
    "restart markers": {"restart_marker_blocks": 5},
    "progressive, restart markers": {"progressive": True, "restart_marker_rows": 2},
    "not subsampled": {"quality": 95, "subsampling": 0},
    "comment": {"comment": b"\xff\xd9\xff\x01" * 20},
}


def encoded(kind: str = "JPEG", **ways: object) -> bytes:
    """Encode an image of 200 x 160 pixels with some noise."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(40, 200, (20, 25, 3), dtype=np.uint8)).resize((200, 160))
    pixels = np.asarray(coarse, np.int16) + rng.integers(-9, 10, (160, 200, 3), dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, kind, **ways)
    return file.getvalue()


@pytest.mark.parametrize("way", WAYS)
def test_valid_jpeg_passes_and_every_truncation_is_found(way):
    content = encoded(**WAYS[way])
    assert find_damage(content) == ""
    assert find_damage(content + b"what a camera puts behind an image") == ""
    assert all(find_damage(content[:size]) for size in range(3, len(content) - 1))


@pytest.mark.parametrize("way", ["default", "optimized", "restart markers", "not subsampled"])
def test_zeroed_bytes_of_a_jpeg_are_found(way):
    content = encoded(**WAYS[way])
    for at in range(700, len(content) - 130, 97):
        found = find_damage(content[:at] + bytes(128) + content[at + 128 :])
        assert "zeros" in found or "restart" in found


@pytest.mark.parametrize("ways", [{}, {"optimize": True}, {"quality": 30}])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_single_color_jpeg_passes(ways, mode):
    """Check images whose entropy-coded data is zeros with optimized tables."""
    file = io.BytesIO()
    Image.new(mode, (3000, 2000)).save(file, "JPEG", **ways)
    assert find_damage(file.getvalue()) == ""


def test_random_bytes_in_a_jpeg_are_mostly_found():
    content, rng = encoded(quality=95), np.random.default_rng(0)
    places = rng.integers(700, len(content) - 2050, 200).tolist()
    found = [bool(find_damage(content[:at] + rng.bytes(2048) + content[at + 2048 :])) for at in places]
    assert sum(found) >= 190


def test_jpeg_restart_markers_out_of_order_are_damage():
    content = encoded(restart_marker_blocks=5)
    first = content.index(b"\xff\xd3")
    assert "out of order" in find_damage(content[: first + 1] + b"\xd5" + content[first + 2 :])
    interval = content.index(b"\xff\xdd")
    assert "out of order" in find_damage(content[:interval] + content[interval + 6 :])


def test_damaged_segments_of_a_jpeg_are_found():
    content = encoded()
    tables = content.index(b"\xff\xdb")
    assert "marker is missing" in find_damage(content[:tables] + b"\x7f" + content[tables + 1 :])
    assert "damaged" in find_damage(content[: tables + 1] + b"\x02" + content[tables + 2 :])
    assert "damaged" in find_damage(content[: tables + 2] + b"\xff\xff" + content[tables + 4 :])


def test_every_changed_byte_of_a_png_is_found():
    content = encoded("PNG")
    assert find_damage(content) == ""
    for at in [*range(8, 60), *range(60, len(content), 997), *range(len(content) - 24, len(content))]:
        assert find_damage(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
    assert all(find_damage(content[:size]) for size in range(8, len(content), 997))


def test_only_jpeg_and_png_structure_is_checked():
    assert find_damage(b"") == find_damage(b"<html>404</html>") == find_damage(encoded("BMP")) == ""
