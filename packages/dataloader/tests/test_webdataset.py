"""WebDataset tar files of images with texts: damage is refused with the file and the byte offset."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from gangline.errors import UserError
from gangline_dataloader.images.webdataset import list_samples


@pytest.mark.parametrize("size", [1 << 20, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 80])
@pytest.mark.parametrize("which", [0, 1])
def test_member_larger_than_tar_file_is_refused(size, which, tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for kind in ("jpg", "txt"):
            member = tarfile.TarInfo(f"000.{kind}")
            member.size = 5
            tar.addfile(member, io.BytesIO(b"12345"))
    assert len(list_samples(str(path))) == 1
    content = bytearray(path.read_bytes())
    head = content[1024 * which : 1024 * which + 512]
    head[124:136] = b"\x80" + size.to_bytes(11, "big")
    head[148:156] = b" " * 8
    head[148:156] = f"{sum(head):06o}\0 ".encode()
    content[1024 * which : 1024 * which + 512] = head
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.tar (is damaged|cannot be read|: sample|has no)"):
        list_samples(str(path))


BLOCK = 512
SAMPLES = [(f"{number:03d}.{kind}", f"{kind} {number}".encode()) for number in range(6) for kind in ("jpg", "txt")]
HEADER = 2 * BLOCK * 6  # first byte of the header of 003.jpg


def write_tar(path: Path, members: Iterable[tuple[str, bytes]] = SAMPLES) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def join(path: Path) -> None:
    path.write_bytes(path.read_bytes() + write_tar(path.with_suffix(".more")).read_bytes())


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped bit": (lambda path: overwrite(path, HEADER + 1, b"1"), f"damaged at byte {HEADER}"),
    "flipped size": (lambda path: overwrite(path, HEADER + 134, b"2"), f"damaged at byte {HEADER}"),
    "zeroed header": (lambda path: overwrite(path, HEADER, bytes(BLOCK)), f"content at byte {HEADER + BLOCK}, after"),
    "zeroed first header": (lambda path: overwrite(path, 0, bytes(BLOCK)), f"content at byte {BLOCK}, after"),
    "truncated between samples": (lambda path: os.truncate(path, HEADER), f"ends at byte {HEADER} without"),
    "truncated in a header": (lambda path: os.truncate(path, HEADER + 9), f"ends at byte {HEADER + 9} without"),
    "truncated in the padding": (lambda path: os.truncate(path, HEADER - 9), "cannot be read after byte"),
    "joined by cat": (join, f"content at byte {BLOCK * 40}, after the end"),
    "no end": (lambda path: os.truncate(path, BLOCK * 24), f"ends at byte {BLOCK * 24} without the end"),
    "short end": (lambda path: os.truncate(path, BLOCK * 25 - 1), f"ends at byte {BLOCK * 25 - 1} without the end"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_tar_file_is_refused_with_byte(kind, tmp_path):
    """Damage a tar file so that tarfile returns some members and no error."""
    change, message = DAMAGE[kind]
    path = write_tar(tmp_path / "a.tar")
    assert len(list_samples(str(path))) == 6
    change(path)
    with pytest.raises(UserError, match=rf"a\.tar .*{message}"):
        list_samples(str(path))


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_header_bit_flip_never_drops_a_sample(tar_format, tmp_path):
    path = tmp_path / "a.tar"
    name = "k" * (80 if tar_format == tarfile.USTAR_FORMAT else 150)
    with tarfile.open(path, "w", format=tar_format) as tar:
        for kind in ("jpg", "txt"):
            member = tarfile.TarInfo(f"{name}.{kind}")
            member.size = 5
            tar.addfile(member, io.BytesIO(b"12345"))
    content = path.read_bytes()
    end = len(content.rstrip(b"\0"))
    for at in range(0, end, 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        try:
            found = len(list_samples(str(path)))
        except UserError:
            continue
        assert found == 1


def test_shard_written_by_gnu_tar_is_read(tmp_path):
    for name, content in SAMPLES:
        (tmp_path / name).write_bytes(content)
    path = tmp_path / "a.tar"
    for blocking in ("--blocking-factor=1", "--blocking-factor=20"):
        subprocess.run(["tar", blocking, "-cf", path, "-C", tmp_path, *(name for name, _ in SAMPLES)], check=True)
        files = list_samples(str(path))
        assert [bytes(files.read(number)[0]) for number in range(6)] == [content for _, content in SAMPLES[::2]]


def test_identity_changes_with_the_bytes_of_a_shard(tmp_path):
    """Swap contents of equal size, so that only bytes differ; a copy elsewhere keeps the identity."""
    members = [("0.jpg", bytes(100_000)), ("0.txt", b"red"), ("1.jpg", bytes(100_000)), ("1.txt", b"dog")]
    path, copy = tmp_path / "a.tar", tmp_path / "copy"
    copy.mkdir()
    first = list_samples(str(write_tar(path, members))).compute_identity()
    assert list_samples(str(write_tar(copy / "a.tar", members))).compute_identity() == first
    swapped = [members[0], members[3], members[2], members[1]]
    write_tar(path, [(name, content) for (name, _), (_, content) in zip(members, swapped, strict=True)])
    assert list_samples(str(path)).compute_identity() != first
    write_tar(path, members)
    os.truncate(path, path.stat().st_size + BLOCK)
    assert list_samples(str(path)).compute_identity() != first


def append(path: Path) -> None:
    with tarfile.open(path, "a") as tar:
        tar.addfile(tarfile.TarInfo("999.jpg"))


CHANGES: dict[str, Callable[[Path], None]] = {
    "overwritten": lambda path: overwrite(path, BLOCK, b"Z"),
    "replaced": lambda path: write_tar(path.with_suffix(".new"), SAMPLES[::-1]).replace(path) and None,
    "truncated": lambda path: os.truncate(path, 3 * BLOCK),
    "appended": append,
    "removed": Path.unlink,
}


@pytest.mark.parametrize("kind", CHANGES)
def test_error_names_shard_changed_during_run(kind, tmp_path):
    path = write_tar(tmp_path / "a.tar")
    os.utime(path, (1e9, 1e9))
    files = list_samples(str(path))
    files.read(0)
    CHANGES[kind](path)
    for number in (0, 5):
        with pytest.raises(UserError, match=r"a\.tar has changed since the run began"):
            files.read(number)


DOUBLED: dict[str, tuple[list[tuple[str, bytes]], str]] = {
    "text in a row": ([SAMPLES[0], SAMPLES[1], ("000.txt", b"b"), *SAMPLES[2:]], "000.txt at byte 2048 .* second text"),
    "image in a row": ([SAMPLES[0], *SAMPLES], "000.jpg at byte 1024 .* second image"),
    "key again later": ([*SAMPLES, *SAMPLES[2:4]], f"001.jpg at byte {BLOCK * 24} .* second image"),
    "jpg and png": ([*SAMPLES, ("004.png", b"png")], "004.png .* second image"),
    "by case": ([*SAMPLES, ("004.TXT", b"b")], "004.TXT .* second text"),
}


@pytest.mark.parametrize("kind", DOUBLED)
def test_sample_with_duplicate_member_kind_is_refused(kind, tmp_path):
    """Write a second image or text to a sample, so that the pair is ambiguous."""
    members, message = DOUBLED[kind]
    with pytest.raises(UserError, match=rf"a\.tar: {message}"):
        list_samples(str(write_tar(tmp_path / "a.tar", members)))


def test_members_of_sample_need_not_be_adjacent(tmp_path):
    texts_last = sorted(SAMPLES, key=lambda member: member[0].endswith("txt"))
    others = [("000.json", b"{}"), ("000.text", b"x"), ("000.image", b"x"), ("in/000.jpg", b"i"), ("in/000.txt", b"t")]
    files = list_samples(str(write_tar(tmp_path / "a.tar", [*texts_last, *others])))
    assert [bytes(image) for image in (files.read(n)[0] for n in range(7))] == [*(c for _, c in SAMPLES[::2]), b"i"]


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_an_image_that_is_a_link_is_refused(kind, tmp_path):
    """Write image and text as links, as GNU tar stores second names; such a sample must not be dropped."""
    path = write_tar(tmp_path / "a.tar")
    with tarfile.open(path, "a") as tar:
        for name in ("009.jpg", "009.txt"):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "000" + name[3:]
            tar.addfile(member)
    with pytest.raises(UserError, match=r"a\.tar: 009\.jpg at byte 12288 is not a regular file"):
        list_samples(str(path))


def test_a_sample_without_image_and_text_is_refused(tmp_path):
    path = write_tar(tmp_path / "a.tar", [*SAMPLES, ("009.webp", b"w"), ("009.json", b"{}")])
    with pytest.raises(UserError, match=r"sample 009 has no image .*\n.*\.webp, \.json"):
        list_samples(str(path))


def write_folder(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_tar(folder / name)
    return folder


def test_tar_files_with_capitals_are_read(tmp_path):
    write_folder(tmp_path, "0.tar", "1.TAR", "2.Tar")
    (tmp_path / "readme.md").write_text("three shards")
    (tmp_path / "empty").mkdir()
    found = list_samples(str(tmp_path))
    assert [path.name for path in found.files] == ["0.tar", "1.TAR", "2.Tar"]
    assert len(found) == 18


@pytest.mark.parametrize("name", ["2.tar.gz", "2.tgz", "2.TAR.GZ", "2.tar.zst", "2.tar.bz2", "2.txz"])
def test_compressed_tar_files_are_refused_by_name(name, tmp_path):
    """Check the file also alone in a folder, and as data.path."""
    write_folder(tmp_path / "with", "0.tar", name)
    write_folder(tmp_path / "alone", name)
    for path in (tmp_path / "with", tmp_path / "alone", tmp_path / "alone" / name):
        with pytest.raises(UserError, match=r"compressed tar file") as refused:
            list_samples(str(path))
        assert name in str(refused.value)
        assert "0.tar" not in str(refused.value)


def test_nested_folders_with_tar_files_are_refused(tmp_path):
    write_folder(tmp_path / "with", "0.tar", "sub/3.tar", "deep/er/4.tar.gz", ".hidden/5.tar")
    write_folder(tmp_path / "alone", "train/0.tar", "val/1.tar")
    for folder, below in (("with", ("sub", "deep/er")), ("alone", ("train", "val"))):
        with pytest.raises(UserError, match="in subfolders") as refused:
            list_samples(str(tmp_path / folder))
        for name in below:
            assert f"data.path={tmp_path / folder / name}" in str(refused.value)
        assert "hidden" not in str(refused.value)


def test_error_for_many_compressed_files_is_short(tmp_path):
    write_folder(tmp_path, *(f"{number:03d}.tar.gz" for number in range(50)))
    with pytest.raises(UserError, match="50 compressed tar files") as refused:
        list_samples(str(tmp_path))
    assert len(str(refused.value)) < 1000
