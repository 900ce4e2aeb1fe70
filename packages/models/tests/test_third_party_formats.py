"""Model formats of third-party packages: a format that fails to load, and two formats of one architecture."""

from __future__ import annotations

import json
import sys

import pytest

from gangline.errors import UserError
from gangline_models.hugging_face.config import read_edited_config, read_model_config
from gangline_testkit import as_installed

PLUGIN = """
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.config import ModelConfig


@dataclass
class Theirs(ModelConfig):
    pass


@hookimpl
def gangline_models():
    formats = {{"hugging_face": "{spec}"}}
    yield Part(name="theirs", config=Theirs, build="theirs:build", summary="A model", capabilities=formats)
"""


@pytest.fixture
def directory(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96, "rms_norm_eps": 1e-5}
    config |= {"hidden_act": "silu", "rope_theta": 1e4, "max_position_embeddings": 64, "tie_word_embeddings": False}
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    return tmp_path / "llama"


@pytest.fixture(autouse=True)
def forget_modules():
    """Remove the modules of a test, because every test has other modules of the same names."""
    yield
    for name in ("theirs", "broken_format", "other_format"):
        sys.modules.pop(name, None)


def install(tmp_path, spec):
    (tmp_path / "theirs.py").write_text(PLUGIN.format(spec=spec))
    return as_installed("gangline-theirs", "theirs", path=tmp_path)


def test_broken_model_format_does_not_block_other_formats(tmp_path, directory):
    (tmp_path / "broken_format.py").write_text("raise OSError('libfoo.so is missing')")
    with install(tmp_path, "broken_format:Format"):
        assert read_model_config(directory).dim == 48
        (directory / "config.json").write_text('{"architectures": ["Foo"]}')
        with pytest.raises(UserError) as refused:
            read_model_config(directory)
    assert "holds a model of architecture Foo, which cannot be loaded." in refused.value.what
    assert (
        "The format of model=theirs (gangline-theirs) is missing: OSError: libfoo.so is missing"
        in refused.value.details
    )


def test_two_formats_for_one_architecture_are_refused(tmp_path, directory):
    (tmp_path / "other_format.py").write_text(
        "from gangline_models.families.decoder import DecoderFormat\n\n\nclass Format(DecoderFormat):\n    pass\n"
    )
    with install(tmp_path, "other_format:Format"), pytest.raises(UserError) as refused:
        read_model_config(directory)
    assert refused.value.what == f"{directory} holds a model of architecture LlamaForCausalLM, which cannot be loaded."
    assert refused.value.details[0].endswith("model=theirs (gangline-theirs) both support this architecture.")


EDIT = """
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.config import EditConfig


@dataclass
class Tweak(EditConfig):
    pass


@hookimpl
def gangline_model_edits():
    formats = {"hugging_face": "broken_format:Format"}
    yield Part(group="tweak", name="on", config=Tweak, build="theirs:edit", summary="An edit", capabilities=formats)
"""


def test_broken_edit_format_is_refused(tmp_path, directory):
    """Check a refusal: the model may belong to the edit whose format is broken."""
    (tmp_path / "broken_format.py").write_text("raise OSError('libfoo.so is missing')")
    (tmp_path / "theirs.py").write_text(EDIT)
    with as_installed("gangline-theirs", "theirs", path=tmp_path), pytest.raises(UserError) as refused:
        read_edited_config(directory)
    assert refused.value.what == "the Hugging Face format of theirs.Tweak cannot be loaded: broken_format:Format."
    assert refused.value.details[0] == "OSError: libfoo.so is missing"
