"""Links in a folder of texts: each file is read once, and files outside the folder only on request."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gangline.errors import UserError
from gangline_basics.data.corpus import list_corpus as of_train
from gangline_dataloader.prepare.inputs import list_inputs as of_prepare

LISTINGS = {"train": lambda path: of_train(str(path)), "prepare": lambda path: of_prepare([str(path)])}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder with one file and one file in a subfolder; a private file is outside."""
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    (tmp_path / "corpus" / "a.txt").write_text("a")
    (tmp_path / "corpus" / "deep" / "b.txt").write_text("b")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    return tmp_path / "corpus"


LINKS = {
    "a file": ("notes.txt", "../private/key", "which is outside of"),
    "a file, by links": ("deep/notes.txt", "../../corpus/../private/key", "which is outside of"),
    "a file of the system": ("env.txt", "/proc/self/environ", "which is outside of"),
    "a folder": ("more", "../private", "which is outside of"),
    "a folder around it": ("more", "..", "which is outside of"),
    "nothing": ("gone.txt", "../gone", "which is missing"),
    "itself": ("loop.txt", "loop.txt", "which is missing"),
}


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("command", LISTINGS)
def test_link_out_of_folder_is_refused_by_name(command, kind, folder):
    name, target, why = LINKS[kind]
    (folder / name).symlink_to(target)
    with pytest.raises(UserError, match=why) as error:
        LISTINGS[command](folder)
    assert str(folder / name) in str(error.value)


@pytest.mark.parametrize("command", LISTINGS)
def test_links_inside_folder_are_read_without_loops(command, folder):
    (folder / "same.txt").symlink_to("deep/b.txt")
    (folder / "twice").symlink_to("deep")
    (folder / "deep" / "loop").symlink_to("..")
    (folder.parent / "named").symlink_to("corpus")
    for named in (folder, folder.parent / "named", f"{folder}{os.sep}"):
        assert [file.name for file in LISTINGS[command](named)] == ["a.txt", "deep/b.txt", "same.txt"]


@pytest.mark.parametrize("command", LISTINGS)
def test_explicitly_named_link_is_read(command, folder):
    """Name the link itself or a pattern that matches it, because caches of datasets consist of links."""
    (folder / "notes.txt").symlink_to("../private/key")
    assert [file.size for file in LISTINGS[command](folder / "notes.txt")] == [6]
    assert sorted(file.size for file in LISTINGS[command](folder / "*.txt")) == [1, 6]


@pytest.mark.parametrize("command", LISTINGS)
def test_pipe_in_folder_is_refused(command, folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(UserError, match="pipe is not a regular file"):
        LISTINGS[command](folder)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("command", LISTINGS)
def test_named_special_file_is_refused(command, kind, folder, monkeypatch):
    monkeypatch.chdir(folder)
    path = folder / "other"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/null")
    else:
        server = socket.socket(socket.AF_UNIX)
        server.bind("other")
        server.close()
    for named in (path, folder / "*"):
        with pytest.raises(UserError, match=f"other is a {kind}, not a regular file"):
            LISTINGS[command](named)
