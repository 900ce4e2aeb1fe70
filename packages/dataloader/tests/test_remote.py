"""Token stores behind a URL: samples equal those on disk, bounded cache, retries with one deadline."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import xxhash

from gangline.config.check import find_problems
from gangline.config.resume import continue_run
from gangline.config.serial import to_dict
from gangline.errors import UserError
from gangline_dataloader import commands
from gangline_dataloader.sources import build, windows
from gangline_dataloader.store.fields import add_checksum
from gangline_dataloader.store.manifest import FILE, read
from gangline_dataloader.store.remote.cache import FileCache
from gangline_dataloader.store.remote.fetch import Remote
from gangline_dataloader.store.remote.tokens import RemoteTokens
from gangline_testkit.runs import build_small_run

pytest.importorskip("aiohttp", reason="fsspec reads http with it")


class Handler(BaseHTTPRequestHandler):
    """HTTP server of files with byte ranges, like an object store.

    `server.trouble(path)` may return a status to answer instead. `server.spoilt(path, content)` returns the length and
    the content to send.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Range")))
        status, path = self.server.trouble(self.path), self.server.root / self.path.lstrip("/")
        content = path.read_bytes() if path.is_file() else b""
        if status is None:
            status = 404 if not path.is_file() else 200
            if status == 200 and (asked := self.headers.get("Range")):
                first, _, last = asked.removeprefix("bytes=").partition("-")
                content, status = content[int(first) : int(last) + 1], 206
        else:
            content = b""
        self.send_response(status)
        said, content = self.server.spoilt(self.path, content)
        self.send_header("Content-Length", str(said))
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = said != len(content)

    def do_HEAD(self) -> None:
        path = self.server.root / self.path.lstrip("/")
        self.send_response(200 if path.is_file() else 404)
        self.send_header("Content-Length", str(path.stat().st_size if path.is_file() else 0))
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Discard log messages."""


@pytest.fixture
def server(tmp_path):
    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.root, served.asked, served.trouble = tmp_path, [], lambda path: None
    served.spoilt = lambda path, content: (len(content), content)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield served
    served.shutdown()


@pytest.fixture
def store(texts, make_store) -> Path:
    folder = make_store(texts, clean=(), shard_tokens=3000, validation=0.2)
    assert commands.main(["prepare", "--out", str(folder), "--pack", "48"]) == 0
    assert len(read(folder).shards) > 4
    return folder


@pytest.fixture
def talks(tmp_path, make_store) -> Path:
    """Return a store of conversations."""
    turns = [("user", "count {n}" * 4), ("assistant", "{n} and {n} " * 9)]
    rows = [{"messages": [{"role": role, "content": text.format(n=n)} for role, text in turns]} for n in range(150)]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    how = {"chat": True, "chat_template": str(tmp_path / "mine.jinja"), "field": "messages", "clean": ()}
    folder = make_store(tmp_path / "talks.jsonl", **how, shard_tokens=2000, validation=0.2)
    assert commands.main(["prepare", "--out", str(folder), "--pack", "48"]) == 0
    return folder


def url(server, store: Path) -> str:
    return f"http://127.0.0.1:{server.server_port}/{store.name}"


SIZES = ("model.vocab_size=256", "batch.sequence_length=48", "data=tokens", "validate.every=10")


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_remote_samples_equal_local_samples(server, store, tmp_path, split, packing):
    asked = (*SIZES, f"data.packing={packing}", "data.document_masking=true", f"data.cache={tmp_path / 'cache'}")
    ours, theirs = (build_small_run(*asked, f"data.path={path}") for path in (url(server, store), store))
    assert find_problems(ours) == []
    mine, reference = (build.build_tokens(run.data, run, split) for run in (ours, theirs))
    assert mine.compute_fingerprint() == reference.compute_fingerprint()
    for i in range(min(60, reference.count_samples() + 3)):
        one, other = mine.sample(i), reference.sample(i)
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)
    shards = [path for path, wanted in server.asked if path.endswith(".npy")]
    assert len(shards) == len(set(shards)), "a shard is fetched once"


def test_cache_size_stays_within_limit(server, store, tmp_path, monkeypatch):
    """Use a span of few shards and a cache with room for it: samples are equal, and shards are evicted."""
    limit = 60_000
    monkeypatch.setattr(windows, "AHEAD", 16)
    asked = (*SIZES, "data.shuffle_span=2000", f"data.cache={tmp_path / 'cache'}", f"data.cache_bytes={limit}")
    run, local = (build_small_run(*asked, f"data.path={path}") for path in (url(server, store), store))
    assert find_problems(run) == []
    mine, reference = (build.build_tokens(one.data, one, "train") for one in (run, local))
    cache = FileCache(tmp_path / "cache", limit)
    most = 0
    for i in range(reference.count_samples()):
        assert np.array_equal(mine.sample(i)["tokens"], reference.sample(i)["tokens"])
        most = max(most, cache.count_bytes())
    assert most <= limit
    whole = sum(path.stat().st_size for path in store.glob("shard-?????.npy"))
    assert whole > limit, "the store is larger than the cache"


def test_span_larger_than_cache_is_refused_with_sizes(server, store, tmp_path):
    asked = (*SIZES, f"data.path={url(server, store)}", f"data.cache={tmp_path / 'cache'}")
    for span in ("data.shuffle_span=null", "data.shuffle_span=30000"):
        (problem,) = find_problems(build_small_run(*asked, span, "data.cache_bytes=9000"))
        assert "data.cache_bytes=9000 is too small" in problem.what
        needed = int(problem.why.split("data.cache_bytes=")[1].split(",")[0])
        assert str(needed) in problem.why.splitlines()[0]
        assert find_problems(build_small_run(*asked, span, f"data.cache_bytes={needed}")) == []
    assert not [path for path, _ in server.asked if path.endswith(".npy")], "a check reads no shard"


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("span", ["null", "2400"])
def test_cache_of_suggested_size_fetches_each_file_once(server, talks, tmp_path, packing, span, monkeypatch):
    """Use conversations, whose loss mask files are as large as their tokens, and read the validation part too."""
    monkeypatch.setattr(windows, "AHEAD", 16)
    asked = (*SIZES, f"data.path={url(server, talks)}", f"data.cache={tmp_path / 'cache'}", f"data.packing={packing}")
    asked = (*asked, f"data.shuffle_span={span}", "data.document_masking=true")
    (problem,) = find_problems(build_small_run(*asked, "data.cache_bytes=5000"))
    needed = int(problem.why.split("data.cache_bytes=")[1].split(",")[0])
    run = build_small_run(*asked, f"data.cache_bytes={needed}")
    assert find_problems(run) == []
    server.asked.clear()
    source = build.build_tokens(run.data, run, "train")
    held_out = build.build_tokens(run.data, run, "validation")
    cache = FileCache(tmp_path / "cache", needed)
    for i in range(50):
        source.fill(np.array([i]))
        if i % 10 == 0:
            held_out.fill(np.array([i // 10]))
        for one in (source, held_out):
            for store in one.stores:
                for opened in (store.shard, store.shard_ends, store.shard_loss):
                    opened.cache_clear()  # as if more shards were read than stay mapped
        assert cache.count_bytes() <= needed
    fetched = [path for path, wanted in server.asked if path.endswith(".npy")]
    assert any(path.endswith(".loss.npy") for path in fetched)
    assert len(fetched) == len(set(fetched))


def test_http_503_is_retried_and_counted(server, store, tmp_path):
    left = [3]

    def trouble(path: str) -> int | None:
        if path.endswith("shard-00000.npy") and left[0]:
            left[0] -= 1
            return 503
        return None

    server.trouble = trouble
    remote = Remote(url(server, store), 30.0)
    size = (store / "shard-00000.npy").stat().st_size
    remote.fetch("shard-00000.npy", size, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (store / "shard-00000.npy").read_bytes()
    assert remote.retries == 3


def test_answers_of_wrong_length_are_retried(server, store, tmp_path):
    """Answer busy first, then too little, less than the stated length, too much, and then the correct content."""
    answers = [
        lambda content: (len(content) // 2, content[: len(content) // 2]),
        lambda content: (len(content), content[: len(content) // 2]),
        lambda content: (len(content) + 2, content + b"??"),
    ]
    busy = [2]

    def trouble(path: str) -> int | None:
        busy[0] -= path.endswith("shard-00000.npy")
        return 503 if path.endswith("shard-00000.npy") and busy[0] >= 0 else None

    def spoilt(path: str, content: bytes) -> tuple[int, bytes]:
        there = path.endswith("shard-00000.npy") and busy[0] < 0 and answers
        return answers.pop(0)(content) if there else (len(content), content)

    server.trouble, server.spoilt = trouble, spoilt
    remote = Remote(url(server, store), 60.0)
    size = (store / "shard-00000.npy").stat().st_size
    remote.fetch("shard-00000.npy", size, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (store / "shard-00000.npy").read_bytes()
    assert (remote.retries, answers) == (5, [])


def test_three_runs_share_a_small_cache(server, store, tmp_path):
    """Run three processes that evict each other's files; all samples must be correct."""
    asked = (*SIZES, "data.shuffle_span=2000", "data.document_masking=true")
    script = tmp_path / "reader.py"
    script.write_text(READER)
    words = [*asked, f"data.cache={tmp_path / 'cache'}", "data.cache_bytes=20000", f"data.path={url(server, store)}"]
    running = [subprocess.Popen([sys.executable, str(script), *words], stdout=subprocess.PIPE) for _ in range(3)]
    found = [process.communicate()[0].decode().strip() for process in running]
    run = build_small_run(*asked, f"data.path={store}")
    local, digest = build.build_tokens(run.data, run, "train"), xxhash.xxh3_128()
    for i in range(local.count_samples()):
        digest.update(local.sample(i)["tokens"].tobytes())
    assert found == [digest.hexdigest()] * 3
    assert FileCache(tmp_path / "cache", 20000).count_bytes() <= 20000


READER = """
import sys, xxhash
from gangline_testkit.runs import build_small_run
from gangline_dataloader.sources import build, windows
windows.AHEAD = 16
run = build_small_run(*sys.argv[1:])
source, digest = build.build_tokens(run.data, run, "train"), xxhash.xxh3_128()
for i in range(source.count_samples()):
    digest.update(source.sample(i)["tokens"].tobytes())
print(digest.hexdigest())
"""


def test_fetch_gives_up_after_deadline(server, store, tmp_path):
    over = threading.Event()
    for trouble in (lambda path: 503, lambda path: over.wait(600) and None):
        server.trouble = trouble
        remote = Remote(url(server, store), 1.0)
        with pytest.raises(UserError, match=r"shard-00000\.npy cannot be fetched"):
            remote.fetch("shard-00000.npy", 1000, tmp_path / "copy")
    over.set()


def test_damaged_or_missing_download_is_refused(server, store, tmp_path):
    path = store / "shard-00001.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    asked = (*SIZES, f"data.path={url(server, store)}", f"data.cache={tmp_path / 'cache'}", "data.deadline=5")
    run = build_small_run(*asked)
    source = build.build_tokens(run.data, run, "train")
    with pytest.raises(UserError, match=r"shard-00001\.npy was damaged in each of 3 downloads"):
        [source.sample(i) for i in range(source.count_samples())]
    path.unlink()
    with pytest.raises(UserError, match=r"cannot be fetched(.|\n)*The file does not exist"):
        [source.sample(i) for i in range(source.count_samples())]


def test_large_file_is_downloaded_in_few_ranges(server, tmp_path):
    content = np.random.default_rng(0).integers(0, 256, 20_000_001, dtype=np.uint8).tobytes()
    (tmp_path / "large.npy").write_bytes(content)
    remote = Remote(f"http://127.0.0.1:{server.server_port}", 30.0)
    remote.fetch("large.npy", len(content), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content
    assert len(server.asked) == 3


def test_abandoned_download_does_not_write_to_other_files(server, tmp_path, monkeypatch):
    """Write late, after the file is given up and its descriptor number belongs to another file."""
    (tmp_path / "a.npy").write_bytes(b"x" * 1000)
    real, late, given_up, done = os.pwrite, threading.Event(), threading.Event(), threading.Event()

    def pwrite(descriptor: int, content: bytes, at: int) -> int:
        late.set()
        given_up.wait(60)
        try:
            return real(descriptor, content, at)
        finally:
            done.set()

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(UserError, match="cannot be fetched"):
        Remote(f"http://127.0.0.1:{server.server_port}", 3.0).fetch("a.npy", 1000, tmp_path / "copy")
    assert late.is_set()
    others = [(tmp_path / f"other-{n}").open("wb") for n in range(20)]
    given_up.set()
    assert done.wait(60)
    assert [os.fstat(one.fileno()).st_size for one in others] == [0] * 20
    for one in others:
        one.close()


def test_shard_evicted_immediately_is_still_read(server, store, tmp_path, monkeypatch):
    """Delete each file once it is fetched, as other ranks may; the reader has it open."""
    asked = (*SIZES, f"data.cache={tmp_path / 'cache'}")
    run, local = (build_small_run(*asked, f"data.path={path}") for path in (url(server, store), store))
    mine, reference = (build.build_tokens(one.data, one, "train") for one in (run, local))
    real = FileCache.open

    def opened(self, *words):
        found = real(self, *words)
        for path in self.folder.glob("*.npy"):
            path.unlink(missing_ok=True)  # another thread may fetch the next shard meanwhile
        return found

    monkeypatch.setattr(FileCache, "open", opened)
    for i in range(40):
        assert np.array_equal(mine.sample(i)["tokens"], reference.sample(i)["tokens"])


@pytest.mark.parametrize("status", [401, 403])
def test_forbidden_file_is_not_retried(server, texts, make_store, tmp_path, status):
    """Answer 401 or 403, as S3 does for missing names if listing them is not allowed."""
    store = make_store(texts, clean=(), shard_tokens=3000, validation=0)
    server.trouble = lambda path: None if (server.root / path.lstrip("/")).is_file() else status
    asked = (*SIZES, f"data.cache={tmp_path / 'cache'}")
    run, local = (build_small_run(*asked, f"data.path={path}") for path in (url(server, store), store))
    begun = time.monotonic()
    assert find_problems(run) == []
    assert (
        build.build_tokens(run.data, run, "train").compute_fingerprint()
        == build.build_tokens(local.data, local, "train").compute_fingerprint()
    )
    (problem,) = find_problems(build_small_run(*asked, f"data.path={url(server, store)}/none"))
    assert "manifest.json is denied" in problem.what
    server.trouble = lambda path: status if path.endswith(".npy") else None
    with pytest.raises(UserError, match=r"^access to .*npy is denied"):
        build.build_tokens(run.data, run, "train").sample(0)
    assert time.monotonic() - begun < 200, "it waited for its deadline of ten minutes"


def test_missing_credentials_are_not_retried(monkeypatch):
    class NoCredentialsError(Exception):  # as botocore's, which is known by its name
        pass

    def ask(path):
        raise NoCredentialsError("Unable to locate credentials")

    remote = Remote("memory://store", deadline=5)
    monkeypatch.setattr(type(remote.files), "cat_file", lambda files, path: ask(path))
    with pytest.raises(UserError, match=r"^access to memory://store/manifest.json is denied") as refused:
        remote.read_small_file("manifest.json")
    assert "Set the credentials" in str(refused.value)
    assert remote.retries == 0


@pytest.mark.parametrize("data", ["tokens", "mix", "dali"])
def test_cache_options_may_change_on_resume(data):
    here = {"cache": "/scratch", "cache_bytes": 7, "deadline": 5.0} | ({"prefetch": 3} if data == "dali" else {})
    words = [f"data.{name}={value}" for name, value in here.items()]
    run, changed = continue_run("out", to_dict(build_small_run(f"data={data}")), words)
    assert {name: getattr(run.data, name) for name in here} == here
    assert {f"data.{name}" for name in here} == set(changed)


def test_a_url_without_a_store_is_refused(server, tmp_path):
    cache = f"data.cache={tmp_path / 'cache'}"
    (problem,) = find_problems(build_small_run(*SIZES, f"data.path=http://127.0.0.1:{server.server_port}/none", cache))
    assert "is not a complete token store" in problem.what
    (problem,) = find_problems(build_small_run(*SIZES, "data.path=nothing://here", cache))
    assert "cannot be read" in problem.what


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("distant", [False, True])
def test_missing_or_truncated_files_are_named_before_start(server, store, tmp_path, packing, distant):
    where = url(server, store) if distant else store
    asked = (*SIZES, f"data.packing={packing}", f"data.cache={tmp_path / 'cache'}", f"data.path={where}")
    assert find_problems(build_small_run(*asked)) == []
    torn, gone = store / "shard-00001.npy", store / "validation" / "shard-00000.ends.npy"
    torn.write_bytes(torn.read_bytes()[:-1])
    gone.unlink()
    first, second = find_problems(build_small_run(*asked))
    assert f"shard-00001.npy ({torn.stat().st_size} bytes, expected {torn.stat().st_size + 1})" in first.why
    assert f"{where}/validation: 1 of " in second.what
    assert "shard-00000.ends.npy" in second.why
    assert len(find_problems(build_small_run(*asked, "validate.every=null"))) == 1
    if packing == "best_fit":
        (store / "shard-00002.pack-48.rows.npy").unlink()
        assert "shard-00002.pack-48.rows.npy" in find_problems(build_small_run(*asked))[0].why


def test_remote_store_is_verified_and_shown_like_local(server, talks, capsys):
    where = url(server, talks)
    assert commands.main(["verify", where]) == 0
    assert f"{where}/validation: " in capsys.readouterr().out
    shown = []
    for place in (where, str(talks)):
        assert commands.main(["show", place, "--json"]) == 0
        shown.append({**json.loads(capsys.readouterr().out), "path": ""})
    assert shown[0] == shown[1]
    for name in ("shard-00001.loss.npy", "validation/shard-00000.npy"):
        path = talks / name
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    (talks / "shard-00002.ends.npy").unlink()
    assert commands.main(["verify", where]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0].partition(" ")[0] for line in lines] == [
        f"{where}/{name}" for name in ("shard-00001.loss.npy", "shard-00002.ends.npy", "validation/shard-00000.npy")
    ]


def test_remote_validation_part_matches_manifest_of_store(server, store, tmp_path, capsys):
    """Check as on disk: the part excludes what an interrupted --append added, and errors name the URL."""
    where, cache = url(server, store), FileCache(tmp_path / "cache", 1 << 30)
    before = RemoteTokens(f"{where}/validation", cache, 5.0).identity
    shards = len(read(store / "validation").shards)
    old, plan = (store / FILE).read_bytes(), (store / "validation" / "pack-48.json").read_bytes()
    (tmp_path / "more.txt").write_text("\n\n".join(f"{n} is appended" for n in range(99)))
    words = [str(tmp_path / "more.txt"), "--out", str(store), "--append", "--validation", "0.9"]
    assert commands.main(["prepare", *words]) == 0
    assert RemoteTokens(f"{where}/validation", cache, 5.0).identity != before
    (store / FILE).write_bytes(old)
    assert RemoteTokens(f"{where}/validation", cache, 5.0).identity == before
    (store / "validation" / "pack-48.json").write_bytes(plan)
    for place in (str(store), where):
        capsys.readouterr()
        assert commands.main(["verify", f"{place}/validation"]) == 0
        assert f"{place}/validation: {shards} shards, " in capsys.readouterr().out, "without what was appended"
    for changed, why in (
        ({"held_out": False, "validation": None}, f"{where}/validation does not belong to the store {where}\\."),
        ({"validation": "0" * 32}, f"{where}/validation is not the validation part of the store {where}\\."),
    ):
        (store / FILE).write_text(json.dumps(add_checksum({**json.loads(old), **changed})))
        with pytest.raises(UserError, match=why):
            RemoteTokens(f"{where}/validation", cache, 5.0)
        capsys.readouterr()
        assert commands.main(["verify", where]) == 1
        assert re.match(why, capsys.readouterr().out.splitlines()[-1])
        with pytest.raises(UserError, match=why):
            commands.main(["verify", f"{where}/validation"])
        with pytest.raises(UserError, match=why):
            commands.main(["show", where])


@pytest.mark.parametrize("status", [403, 404])
def test_remote_validation_part_is_read_without_store(server, store, tmp_path, status):
    """Answer 403, as S3 does for missing names if listing them is not allowed, or 404."""
    server.trouble = lambda path: status if path == f"/{store.name}/{FILE}" else None
    where = f"{url(server, store)}/validation"
    found = RemoteTokens(where, FileCache(tmp_path / "cache", 1 << 30), 5.0)
    assert found.identity == read(store / "validation").compute_identity()
    assert commands.main(["verify", where]) == 0


def test_verify_checks_plans_of_listable_remote_store(store, capsys):
    """Use the file system of a directory, which lists names and sizes as an object store does."""
    where = store.as_uri()
    assert commands.main(["verify", where]) == 0
    capsys.readouterr()
    path = store / "shard-00001.pack-48.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert commands.main(["verify", where]) == 1
    assert f"{where}/shard-00001.pack-48.npy: the checksum differs" in capsys.readouterr().out
    sizes = Remote(where, 5.0).find_file_sizes(["shard-00001.npy", "none.npy"])
    assert sizes == {"shard-00001.npy": (store / "shard-00001.npy").stat().st_size, "none.npy": None}
