"""Tar files of images with texts: a member that claims more than its file holds is refused."""

from __future__ import annotations

import io
import tarfile

import pytest

from gangline.errors import UserError
from gangline_dataloader.images.webdataset import listed


@pytest.mark.parametrize("size", [1 << 20, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 80])
@pytest.mark.parametrize("which", [0, 1])
def test_a_member_that_reaches_beyond_its_file_is_refused(size, which, tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for kind in ("jpg", "txt"):
            member = tarfile.TarInfo(f"000.{kind}")
            member.size = 5
            tar.addfile(member, io.BytesIO(b"12345"))
    assert len(listed(str(path))) == 1
    content = bytearray(path.read_bytes())
    head = content[1024 * which : 1024 * which + 512]
    head[124:136] = b"\x80" + size.to_bytes(11, "big")
    head[148:156] = b" " * 8
    head[148:156] = f"{sum(head):06o}\0 ".encode()
    content[1024 * which : 1024 * which + 512] = head
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.tar (is damaged|cannot be read|: sample|has no)"):
        listed(str(path))
