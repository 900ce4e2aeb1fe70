"""The job's store may be anything that keeps its contract, and may be out of reach for a moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.testing.sessions import session
from gangline_ckpt_zarr import agreement
from gangline_ckpt_zarr.agreement import PrefixedStore
from gangline_ckpt_zarr.checkpointer import build


class DictStore:
    """Cannot be reached for so many questions."""

    def __init__(self, lost: int = 0) -> None:
        self.kept: dict[str, bytes] = {}
        self.lost = lost

    def _reach(self) -> dict[str, bytes]:
        if self.lost:
            self.lost -= 1
            raise ConnectionError("the store is lost for a while")
        return self.kept

    def set(self, key: str, value: str | bytes) -> None:
        self._reach()[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self._reach()[key]

    def add(self, key: str, amount: int) -> int:
        kept = self._reach()
        kept[key] = str(int(kept.get(key, b"0")) + amount).encode()
        return int(kept[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self._reach() for key in keys)


def test_a_checkpointer_is_built_on_any_store(tmp_path: Path) -> None:
    s = session(tmp_path / "out", "checkpoint=zarr")
    store = DictStore()
    made = build(s.run.checkpoint, s.run, store)
    assert made.list() == []
    made.close()
    assert store.kept == {"ckpt/made by 0": b"1"}


def test_a_store_that_is_back_soon_was_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_LONGEST", 0.001)
    lost = DictStore(lost=3)
    store = PrefixedStore(lost, "ckpt/1")
    assert store.add("count", 2) == 2
    lost.lost = 3
    store.set("key", "value")
    assert (store.get("key"), store.check(["key", "count"]), store.check(["other"])) == (b"value", True, False)
    assert sorted(lost.kept) == ["ckpt/1/count", "ckpt/1/key"]


def test_one_that_stays_lost_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_UNREACHED", 0.01)
    monkeypatch.setattr(agreement, "_LONGEST", 0.001)
    with pytest.raises(ConnectionError, match="lost for a while"):
        PrefixedStore(DictStore(lost=10**9), "ckpt/1").get("key")
