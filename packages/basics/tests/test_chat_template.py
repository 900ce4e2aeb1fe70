"""Chat templates: text rendered as transformers renders it, and errors of invalid or failing templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from gangline.errors import UserError
from gangline_basics.data.chat import ChatTemplate, TemplateRefusal, read_template
from gangline_basics.data.chat_rows import drop_nulls, parse_messages, parse_tools

ASKED = [{"role": "user", "content": "b < a?"}]


def of(source: str) -> ChatTemplate:
    return ChatTemplate(source, {}, "mine")


@pytest.fixture
def tokenizer(tmp_path):
    def write(template: str, special_map: dict | None = None, **config) -> Path:
        made = Tokenizer(models.WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
        made.save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **config}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if special_map is not None:
            (tmp_path / "special_tokens_map.json").write_text(json.dumps(special_map))
        return tmp_path / "tokenizer.json"

    return write


LISTED = {"1": {"content": "<s>", "special": True}}
CASES = {
    "tools": (
        "{{ tools is not none }}{{ documents is not none }}{{ tools is defined }}",
        None,
        {},
    ),
    "json": ("{{ {'b': 1, 'a': '<é'} | tojson(sort_keys=true, separators=(',', ':')) }}", None, {}),
    "ascii": ("{{ 'é' | tojson(ensure_ascii=true) }}{{ [1] | tojson(indent=2) }}", None, {}),
    "in the map alone": ("{{ bos_token }}", {"bos_token": "<s>"}, {}),
    "in the map as an object": ("{{ bos_token }}", {"bos_token": {"content": "<s>"}}, {}),
    "in both": ("{{ bos_token }}", {"bos_token": "<s>"}, {"bos_token": "a"}),
    "listed": ("{{ bos_token }}", {"bos_token": "a"}, {"bos_token": "<s>", "added_tokens_decoder": LISTED}),
    "scope": ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", None, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_template_renders_like_transformers(tokenizer, case):
    transformers = pytest.importorskip("transformers")
    template, special_map, config = CASES[case]
    path = tokenizer(template, special_map, **config)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent).apply_chat_template(ASKED, tokenize=False)
    assert read_template(str(path)).render(ASKED) == theirs


def test_template_runtime_errors_raise_template_refusal():
    for source, told in (
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ):
        with pytest.raises(TemplateRefusal, match=told):
            of(source).render(ASKED)


HOSTILE = {
    "a huge number": "{{ (10**(10**5))|length }}",
    "brackets": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "no end": "{% for m in messages %}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_template_that_cannot_be_compiled_is_refused(kind):
    with pytest.raises(UserError, match="mine is not a valid chat template"):
        ChatTemplate(HOSTILE[kind], {}, "mine")


def test_template_that_asks_for_date_is_refused():
    with pytest.raises(TemplateRefusal, match=r"requests the date.*data\.template=FILE"):
        of("{{ strftime_now('%Y-%m-%d') }}").render(ASKED)
    assert of("{{ strftime_now is defined }}").render(ASKED) == "False"


def test_generation_blocks_are_located_in_rendered_text():
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}> {% generation %}{{ m.content }}.{% endgeneration %}\n\n"
        "{% else %}{{ m.content }}\n\n{% endif %}{% endfor %}"
    )
    template, said = of(source), [*ASKED, {"role": "assistant", "content": "no"}]
    text, answers = template.render_marked([*said, *said])
    assert template.marks
    assert text == template.render([*said, *said])
    assert [text[start:stop] for start, stop in answers] == ["no.", "no."]
    assert not of("{# {% generation %} #}x").marks
    with pytest.raises(TemplateRefusal, match="marks"):
        of("{% set x %}{% generation %} a{% endgeneration %}{% endset %}{{ x | trim }}").render_marked(ASKED)


def test_invalid_tokenizer_config_is_refused(tokenizer):
    path = tokenizer("x", bos_token={"no": "content"})
    assert read_template(str(path)).special == {}
    for content in ("[1]", "{", "\xff"):
        (path.parent / "tokenizer_config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(UserError, match="cannot be read"):
            read_template(str(path))


def test_malformed_chat_template_list_is_refused(tokenizer):
    for found in (["x"], [{"name": "default", "template": 3}], [{"name": "default"}, "y"], {"default": "x"}, 3):
        path = tokenizer(found)
        with pytest.raises(UserError, match="chat_template is invalid") as error:
            read_template(str(path))
        assert "the template named default is used" in str(error.value)
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d{{ 1 }}"}]
    assert read_template(str(tokenizer(named))).render(ASKED) == "d1"
    for found in (None, named[:1]):
        with pytest.raises(UserError, match="a chat template is missing for"):
            read_template(str(tokenizer(found)))


TOOL = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "default": None}}}
NAMES_TOOLS = "{% for tool in tools or () %}{{ tool | tojson }}{% endfor %}{{ messages[0]['content'] }}"


def test_tools_render_like_transformers(tokenizer):
    transformers = pytest.importorskip("transformers")
    path = tokenizer(NAMES_TOOLS)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent)
    wanted = theirs.apply_chat_template(ASKED, tools=[TOOL], tokenize=False)
    template = read_template(str(path))
    assert template.bind_tools([TOOL]).render(ASKED) == wanted
    assert template.bind_tools(None).render(ASKED) == template.render(ASKED) == ASKED[0]["content"]


def test_tools_of_a_row_are_objects_or_json():
    for value in ([TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]):
        assert parse_tools({"tools": value}, "row 1") == [TOOL]
    for nothing in ({}, {"tools": None}, {"tools": []}, {"tools": ""}, {"tools": "[]"}, {"tools": "null"}):
        assert parse_tools(nothing, "row 1") is None
    for wrong in ("count", ["count"], [3], 3, TOOL, json.dumps(TOOL)):
        with pytest.raises(UserError, match="row 1 has an invalid field tools"):
            parse_tools({"tools": wrong}, "row 1")


def test_tool_call_message_may_have_no_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "count"}]}
    assert parse_messages([call], "row 1") == [{**call, "content": ""}]
    assert drop_nulls({"a": [{"b": None, "c": 1}], "d": None}) == {"a": [{"c": 1}]}
    for silent in ({"role": "assistant", "content": None}, {"role": "assistant", "tool_calls": None}):
        with pytest.raises(UserError, match="whose content is not a string"):
            parse_messages([silent], "row 1")
