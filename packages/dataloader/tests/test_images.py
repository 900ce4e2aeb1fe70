"""`data=dali_images`: training on JPEG files in tar files, with pixels that do not depend on the rank count."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from gangline.config.check import find_problems
from gangline.data.reader import ReadPlace
from gangline.errors import UserError
from gangline_dataloader.images.augment import draw_crops
from gangline_dataloader.images.webdataset import list_samples
from gangline_testkit import as_installed, warm
from gangline_testkit.runs import build_small_run

pytest.importorskip("nvidia.dali", reason="the extra [dali] is not installed")
Image = pytest.importorskip("PIL.Image", reason="the images of this test are written by Pillow")

from gangline_dataloader.images.source import ImageSource  # noqa: E402  # needs both

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}


def picture(number: int) -> tuple[bytes, str]:
    """Return a smooth image whose left half has one color, encoded as JPEG, and its text."""
    name = list(COLOURS)[number % 3]
    width, height = 40 + number % 7, 36 + number % 5
    pixels = np.zeros((height, width, 3), np.float32)
    pixels[:] = np.linspace(60, 180, height)[:, None, None]
    pixels[:, : width // 2] = COLOURS[name]
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG", quality=92)
    return file.getvalue(), f"{name} {number}"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Return a folder of two tar files with 30 images each, as `webdataset` writes them."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(30 * shard, 30 * shard + 30):
                image, text = picture(number)
                for kind, content in (("jpg", image), ("txt", text.encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return folder


SIZES = ("data=dali_images", "data.side=32", "data.places=16", "batch.sequence_length=32", "model.vocab_size=256")


def source(shards: Path, *settings: str, split: str = "train") -> ImageSource:
    run = build_small_run(*SIZES, f"data.path={shards}", "data.validation_fraction=0.1", "validate.every=5", *settings)
    assert find_problems(run) == []
    return ImageSource(run.data, run, split)


def test_uncropped_images_match_pillow(shards):
    """Compare with Pillow's own decoder and resizing, which round differently."""
    one = source(shards, "data.least_area=1", "data.flip=false")
    for i in range(12):
        sample = one.sample(i)
        text = bytes(sample["tokens"][16:]).rstrip(b"\0").decode()
        assert sample["loss_mask"].tolist() == [15 <= n < 16 + len(text) for n in range(32)]
        with Image.open(io.BytesIO(picture(int(text.split()[1]))[0])) as image:
            wanted = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR), np.float32)
        found = (sample["pixels"].transpose(1, 2, 0) + 1) * 127.5
        assert np.abs(found - wanted).mean() < 2.5
        assert np.abs(found[:, 2:13].mean((0, 1)) - COLOURS[text.split()[0]]).max() < 12


def test_epoch_shows_every_training_image_once(shards):
    def names(split: str) -> list[str]:
        one = source(shards, split=split)
        return [bytes(one.sample(i)["tokens"][16:]).rstrip(b"\0").decode() for i in range(one.count_samples())]

    train, held_out = names("train"), names("validation")
    assert sorted([*train, *held_out]) == sorted(picture(n)[1] for n in range(60))
    assert train != sorted(train)


def test_pixels_are_equal_for_every_rank_count(shards):
    one = source(shards)
    for index, width, micro in ((0, 1, 3), (1, 2, 2), (2, 4, 1), (0, 1, 12)):
        place = ReadPlace(index, width, 12, micro, torch.device("cpu"))
        reader = source(shards).open_reader(place)
        for cursor in (0, 24, 7):
            reader.begin(cursor, 0)
            for step in range(2):
                for batch in reader.take():
                    for row, number in enumerate(batch.sample.tolist()):
                        wanted = one.sample(number)
                        assert torch.equal(batch.extra["pixels"][row], torch.from_numpy(wanted["pixels"]))
                        assert np.array_equal(batch.tokens[row].numpy(), wanted["tokens"])
                        assert np.array_equal(batch.loss_mask[row].numpy(), wanted["loss_mask"])
                first = cursor + 12 * step + index * 12 // width
                assert batch.sample.tolist()[-1] == first + 12 // width - 1
        reader.close()
    held = list(source(shards, split="validation").open_reader(place).read_held_out(100))
    assert sum(len(batch.sample) for batch in held) >= 6


def test_crop_depends_on_seed_and_sample(shards):
    assert np.array_equal(source(shards).sample(3)["pixels"], source(shards).sample(3)["pixels"])
    other = source(shards, "run.seed=8")
    same = [np.array_equal(other.sample(i)["pixels"], source(shards).sample(i)["pixels"]) for i in range(6)]
    assert not any(same)
    found = draw_crops(np.arange(4000), 0.5, True, 7, "train")
    area = found.size.prod(1)
    assert 0.5 - 1e-3 <= area.min() <= area.max() <= 1
    assert (found.corner >= 0).all()
    assert (found.corner + found.size <= 1 + 1e-6).all()
    assert abs(found.mirrored.mean() - 0.5) < 0.03


def test_training_on_jpegs_reduces_loss(shards, tmp_path):
    """Train with every part of the path: tar file, decoder, reader, loop, and the edit that embeds patches."""
    words = (
        "recipe=tiny", *SIZES, f"data.path={shards}", "patches=on", "data.flip=false", "data.validation_fraction=0.1",
        "batch.global_size=18", "batch.micro_size=9", "run.steps=40", "run.sample=0", f"run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    with as_installed("gangline-patches", "patches", path=Path(__file__).parent):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [*warm.make_command("gangline.cli.train", environment), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 40
    assert losses[-1] < 0.7 * losses[0]


def test_undecodable_image_error_names_sample_and_byte(shards):
    path = shards / "00001.tar"
    at = int(list_samples(str(path)).image[4, 0])
    content = bytearray(path.read_bytes())
    content[at : at + 200] = bytes(200)
    path.write_bytes(content)
    one = source(shards)
    said = (
        rf"00001\.tar: 000034\.jpg \(sample \d+, at byte {at}\)"
        rf" cannot be decoded.\n.* Not a JPEG or PNG: the content begins with b'\\x00"
    )
    with pytest.raises(UserError, match=said):
        [one.sample(i) for i in range(one.count_samples())]
    reader = one.open_reader(ReadPlace(0, 1, 12, 3, torch.device("cpu")))
    reader.begin(0, 0)
    with pytest.raises(UserError, match=said):
        [reader.take() for _ in range(5)]
    reader.close()


@pytest.mark.parametrize(
    ("length", "end", "truncated"),
    [(14, True, 0), (15, True, 0), (16, True, 0), (17, False, 1), (18, False, 1), (40, False, 1)],
)
def test_truncated_text_has_no_end_token(length, end, truncated, tmp_path):
    """Check T + 1 - places = 17 positions for a text and its end: all are targets; a truncated text has no end."""
    path, text = tmp_path / "a.tar", bytes(65 + n % 26 for n in range(length))
    with tarfile.open(path, "w") as tar:
        for number in range(10):
            for kind, content in (
                ("jpg", picture(number)[0]),
                ("txt", b" \n" + (text if number else b"a") + b"\n" * 9),
            ):
                member = tarfile.TarInfo(f"{number:06d}.{kind}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    one = source(path)
    assert one.count_samples() == 9
    told = f"; {8 * truncated} texts truncated at 17 bytes" if truncated else ""
    assert one.describe() == f"9 images with texts, 32 x 32 pixels{told}"
    assert source(path, split="validation").describe().endswith("; 1 text truncated at 17 bytes") == bool(truncated)
    samples = [one.sample(i) for i in range(9)]
    (sample,) = {sample["tokens"].tobytes(): sample for sample in samples if sample["tokens"][17]}.values()
    learned = sample["tokens"][1:][sample["loss_mask"]].tobytes()
    assert learned == (text + b"\0" if end else text[:17])
    assert sample["loss_mask"].tolist() == [15 <= n < 15 + len(learned) for n in range(32)]
    assert sample["tokens"][16 : 16 + len(learned)].tobytes() == learned


def replace_image(path: Path, number: int, content: bytes) -> None:
    """Write a tar file again with another image for one of its samples."""
    with tarfile.open(path) as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar]
    members[2 * number] = (members[2 * number][0], content)
    with tarfile.open(path, "w") as tar:
        for name, stored in members:
            member = tarfile.TarInfo(name)
            member.size = len(stored)
            tar.addfile(member, io.BytesIO(stored))


def noise(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8)).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("change", ["sector", "truncated", "end"])
def test_a_damaged_image_is_refused(kind, change, shards):
    """Damage images; libjpeg would decode these JPEGs to gray or wrong pixels with only a warning."""
    content = noise(kind)
    half = len(content) // 2
    damaged = {
        "sector": content[:half] + bytes(512) + content[half + 512 :],
        "truncated": content[:half],
        "end": content[:-2],
    }[change]
    replace_image(shards / "00001.tar", 4, damaged)
    one = source(shards)
    with pytest.raises(UserError, match=rf"00001\.tar: 000034\.jpg .*cannot be decoded\.\n  {kind}: "):
        [one.sample(i) for i in range(one.count_samples())]
    reader = one.open_reader(ReadPlace(0, 1, 12, 3, torch.device("cpu")))
    reader.begin(0, 0)
    with pytest.raises(UserError, match=rf"00001\.tar: 000034\.jpg .*cannot be decoded\.\n  {kind}: "):
        [reader.take() for _ in range(5)]
    reader.close()


def huge() -> bytes:
    """Return a JPEG with a sound structure, whose header says 65500 x 65500 pixels."""
    content = picture(0)[0]
    at = content.index(b"\xff\xc0") + 5
    return content[:at] + b"\xff\xdc" * 2 + content[at + 4 :]


UNDECODABLE = {
    "page": (
        b"<html>404</html>",
        r"nvImageCodec failure 4 \(unsupported code stream\)\. Not a JPEG or PNG: the content begins with b'<html>404",
    ),
    "empty": (b"", r"nvImageCodec failure 2 \(invalid parameter\)\. The image has 0 bytes\."),
    "huge": (huge(), "DALI reported no reason; stderr may have messages of its decoders"),
    "no frame": (b"\xff\xd8\xff\xd9", r"nvImageCodec failure 3 \(bad code stream\)\.\n"),
}


@pytest.mark.parametrize("kind", UNDECODABLE)
def test_undecodable_image_error_gives_reason(kind, shards):
    content, why = UNDECODABLE[kind]
    replace_image(shards / "00001.tar", 4, content)
    one = source(shards)
    reader = one.open_reader(ReadPlace(0, 1, 12, 3, torch.device("cpu")))
    reader.begin(0, 0)
    with pytest.raises(UserError, match=rf"00001\.tar: 000034\.jpg .* cannot be decoded\.\n  {why}") as error:
        [reader.take() for _ in range(5)]
    reader.close()
    assert "pipeline" not in str(error.value)


def test_invalid_tar_files_are_refused_by_name(shards, tmp_path):
    def said(path: Path) -> str:
        (problem,) = find_problems(build_small_run(*SIZES, f"data.path={path}"))
        return f"{problem.what} {problem.why}"

    (tmp_path / "empty").mkdir()
    assert "contains no tar files" in said(tmp_path / "empty")
    path = tmp_path / "one.tar"
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("000001.jpg"))
    assert "sample 000001 has no text" in said(path)
    path.write_bytes((shards / "00000.tar").read_bytes()[:700])
    with pytest.raises(UserError, match=r"one\.tar"):
        list_samples(str(path)).read(0)
    path.write_bytes(b"no tar" * 200)
    assert "one.tar cannot be read" in said(path)
