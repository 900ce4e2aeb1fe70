"""`gangline ckpt` on a real S3 server, with only a URL and environment variables, and without a run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from urllib.request import Request, urlopen

import fsspec
import numpy as np
import pytest
import zarr
from aiobotocore.session import AioSession
from made import run_dir, save, small, whole
from moto.server import ThreadedMotoServer

from gangline.cli.main import main
from gangline_ckpt_zarr.stores.open import open_store

PLACE = "step-00000012"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """Yield the URL of a bucket with one checkpoint and the remains of a killed save."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        # Parses the S3 service description only once.
        patch.setitem(fsspec.config.conf, "s3", {"session": AioSession()})
        with urlopen(Request(f"http://{host}:{port}/bucket", method="PUT")):
            pass
        save(open_store(f"s3://bucket/run/{PLACE}"), small())
        open_store("s3://bucket/run").commit("step-00000016/data-12345678/00000.bin", b"half")
        yield "s3://bucket/run"
    server.stop()


def test_ls_and_verify_read_s3_bucket(bucket, capsys):
    assert main(["ckpt", "ls", bucket]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines[1:3]] == [PLACE, "step-00000016"]
    assert lines[1][-3:] == ["store", "complete,", "newest"]
    assert lines[2][-2:] == ["store", "unfinished"]
    assert lines[1][5] == "s"  # an age in seconds, by the store's own clock
    assert main(["ckpt", "verify", bucket]) == 0
    assert f"{bucket}/{PLACE}: good" in capsys.readouterr().out


def test_refs_line_opens_s3_checkpoint(bucket, capsys):
    assert main(["ckpt", "refs", bucket]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    call = ast.parse(line, mode="eval").body
    assert isinstance(call, ast.Call)
    options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert options["storage_options"]["remote_options"] == {"asynchronous": True}
    group = zarr.open_group(ast.literal_eval(call.args[0]), **options)
    for name, layout in small().layouts.items():
        assert np.array_equal(group[name][...], whole(name, layout).double().numpy()), name


def test_s3_open_copy_equals_copy_in_run(bucket, tmp_path, capsys):
    assert main(["ckpt", "copy", bucket, "s3://bucket/open", "--open"]) == 0
    group = zarr.open_group("s3://bucket/open", mode="r")
    for name, layout in small().layouts.items():
        assert np.array_equal(group[name][...], whole(name, layout).double().numpy()), name
    run = run_dir(tmp_path / "run")
    assert main(["ckpt", "copy", bucket, PLACE, str(run)]) == 0
    assert main(["ckpt", "diff", str(run), "s3://bucket/open"]) == 0
    assert main(["ckpt", "copy", str(run), bucket + "/"]) == 2
    assert "already contains a checkpoint" in capsys.readouterr().err


def test_ls_and_verify_include_s3_tier_of_run(bucket, tmp_path, capsys):
    run = run_dir(tmp_path / "run", durable=bucket)
    main(["ckpt", "copy", str(run), PLACE, str(run)])  # copies the durable copy to the run directory
    capsys.readouterr()
    assert main(["ckpt", "ls", str(run)]) == 0
    assert "disk, durable" in capsys.readouterr().out
    assert main(["ckpt", "verify", str(run), "--all"]) == 0
    assert "2 copies: all good" in capsys.readouterr().out


def test_missing_bucket_has_no_checkpoints(bucket, capsys):
    assert main(["ckpt", "ls", "s3://no-such-bucket/run"]) == 0
    assert capsys.readouterr().out == "no checkpoints found in s3://no-such-bucket/run.\n"
    assert main(["ckpt", "verify", "s3://no-such-bucket/run"]) == 2
    assert "no complete checkpoint found in" in capsys.readouterr().err
