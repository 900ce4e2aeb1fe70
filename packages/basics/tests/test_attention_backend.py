"""Option `model.attention_backend`: the kernels that torch tries, and packages of kernels that are missing."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch.nn import attention

from gangline import UserError
from gangline.config.check import find_meaningless
from gangline.config.defaults import build_default_run
from gangline.config.identity import free_options
from gangline.model.init import make_whole_model
from gangline_basics.model import attention_backend
from gangline_basics.model.attention_backend import find_missing, use_backend
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.plan import plan_decoder

SMALL = {"vocab_size": 29, "dim": 16, "layers": 1, "heads": 2, "ffn_dim": 24}


@pytest.fixture(autouse=True)
def restored():
    yield
    attention_backend._order.close()
    attention_backend._current = "auto"


def list_backends() -> list[str]:
    """Return the enabled backends of torch, in order."""
    return [backend.name for backend in attention._cur_sdpa_kernel_backends(with_priority=True)]


def build(backend: str) -> None:
    make_whole_model(*plan_decoder(DecoderConfig(**SMALL, attention_backend=backend)), seed=0, dtype=torch.float32)


@pytest.mark.parametrize(
    ("backend", "wanted"),
    [
        ("cudnn", ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]),
        ("flash", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]),
        ("efficient", ["EFFICIENT_ATTENTION", "MATH"]),
        ("math", ["MATH"]),
    ],
)
def test_attention_backend_sets_order_of_kernels(backend, wanted):
    before = list_backends()
    build("auto")
    assert list_backends() == before
    build(backend)
    assert list_backends() == wanted
    build("auto")
    assert list_backends() == wanted
    build("flash")
    assert list_backends()[0] == "FLASH_ATTENTION"
    attention_backend._order.close()
    assert list_backends() == before


@pytest.mark.parametrize(("backend", "package"), [("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")])
def test_missing_package_of_kernels_is_refused_by_name(backend, package):
    run = build_default_run(model=DecoderConfig(**SMALL, attention_backend=backend))
    (problem,) = run.model.check(run)
    assert f"model.attention_backend={backend}: the package {package} is not installed" in problem.what
    assert "auto, cudnn, flash" in problem.fix
    assert not find_missing("auto")


def test_installed_package_of_kernels_is_accepted(tmp_path, monkeypatch):
    (tmp_path / "flash_attn_interface.py").touch()
    (tmp_path / "flash_attn").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not find_missing("fa3")
    assert find_missing("fa4")  # FlashAttention 2 has the same name, without the folder
    (tmp_path / "flash_attn" / "cute").mkdir()
    assert not find_missing("fa4")
    assert "flash_attn" not in sys.modules


def test_package_of_kernels_is_activated_on_cuda(monkeypatch):
    activated = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: activated.append("FA2"))
    build("fa4")
    build("fa4")
    build("fa3")
    build("flash")
    assert activated == ["FA4", "FA3", "FA2"]


def test_unusable_package_of_kernels_is_a_user_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "list_flash_attention_impls", lambda: ["FA4"])
        with pytest.raises(UserError, match=r"attention_backend=fa3: torch .* does not support FA3"):
            use_backend("fa3")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    with pytest.raises(UserError, match="attention_backend=fa3: torch cannot load FA3"):
        use_backend("fa3")


def test_resume_may_change_attention_backend():
    run = build_default_run(model=DecoderConfig(**SMALL))
    assert "model.attention_backend" in free_options(run)
    assert not find_meaningless(run)
