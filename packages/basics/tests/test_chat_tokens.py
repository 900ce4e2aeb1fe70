"""Loss mask of conversations, compared with transformers, for templates with and without generation tags."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gangline.errors import UserError
from gangline_basics.data.answers import render_chat
from gangline_basics.data.chat import ChatTemplate, TemplateRefusal, read_template
from gangline_basics.data.chat_rows import parse_messages
from gangline_basics.data.chat_tokens import ChatEncoder
from gangline_basics.data.codec import ByteCodec, TokenizerCodec

SPECIAL = ("<s>", "<|turn|>", "<|end|>")
USER = {"role": "user", "content": "How many dögs?"}
CHATS = {
    "one turn": [USER, {"role": "assistant", "content": "There are 3 of them, é."}],
    "a system prompt": [{"role": "system", "content": "Count."}, USER, {"role": "assistant", "content": "3"}],
    "several turns": [USER, {"role": "assistant", "content": "3"}, USER, {"role": "assistant", "content": " four 🐕 "}],
    "spaces": [USER, {"role": "assistant", "content": "  3\n\n"}, USER, {"role": "assistant", "content": "\n"}],
    "the end in the words": [USER, {"role": "assistant", "content": "<|end|> is an end"}, USER],
}
# name -> (text before an answer, end of the answer, text after the answer)
SHAPES = {
    "an end token and a line's end": ("<|turn|>assistant\n", "<|end|>", "\n"),
    "an end token": ("<|turn|>assistant\n", "<|end|>", ""),
    "no end token": ("assistant\n", "\n", ""),
    "a space before the answer": ("A: ", "<|end|>", "\n\n"),
    "two special tokens": ("<|turn|>", "<|end|><s>", "\n"),
}


def of(shape: str, marks: bool) -> str:
    before, end, behind = map(json.dumps, SHAPES[shape])
    begin, stop = ("{% generation %}", "{% endgeneration %}") if marks else ("", "")
    answer = f"{{{{ {before} }}}}{begin}{{{{ m.content + {end} }}}}{stop}{{{{ {behind} }}}}"
    other = f"{{{{ '<|turn|>' + m.role + '\\n' + m.content + {end} + {behind} }}}}"
    prompt = f"{{% if add_generation_prompt %}}{{{{ {before} }}}}{{% endif %}}"
    return (
        f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{answer}{{% else %}}{other}{{% endif %}}"
        f"{{% endfor %}}{prompt}"
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """Path of a byte-level BPE tokenizer that merges words, spaces and line ends."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    texts = [message["content"] for chat in CHATS.values() for message in chat] + ["A: There\n\nassistant\n"]
    made.train_from_iterator(texts * 9, trainer)
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_mask_matches_transformers_assistant_mask(tokenizer, shape, chat):
    """Compare a template with and without generation tags with the mask of transformers, which needs the tags."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), chat_template=of(shape, True))
    asked = {"return_dict": True, "return_assistant_tokens_mask": True}
    wanted = theirs.apply_chat_template(CHATS[chat], **asked)
    codec = TokenizerCodec(str(tokenizer), None, "replace")
    for marks in (True, False):
        template = ChatTemplate(of(shape, marks), {}, "mine")
        (found,) = ChatEncoder(codec, template)([render_chat(template, CHATS[chat])])
        assert found.tokens.tolist() == wanted["input_ids"]
        assert found.loss_mask.astype(int).tolist() == wanted["assistant_masks"], marks
        assert found.loss_mask.any()


def test_end_token_from_special_tokens_map_ends_answer(tokenizer, tmp_path):
    content = json.loads(tokenizer.read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    shape = "an end token and a line's end"
    (tmp_path / "chat_template.jinja").write_text(of(shape, False))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    path = str(tmp_path / "tokenizer.json")
    codec, template = TokenizerCodec(path, None, "replace"), read_template(path)
    (found,) = ChatEncoder(codec, template)([render_chat(template, CHATS["one turn"])])
    assert codec.decode_special(found.tokens[found.loss_mask].tolist()) == "There are 3 of them, é.<|end|>"


def test_codec_ignores_saved_bpe_dropout(tmp_path):
    model = models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")], dropout=0.9)
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    codec = TokenizerCodec(str(tmp_path / "tokenizer.json"), None, "replace")
    assert codec.encode("ab" * 50) == [2] * 50


def test_codec_ignores_saved_truncation_and_padding(tokenizer, tmp_path):
    plain, saved = TokenizerCodec(str(tokenizer), None, "replace"), Tokenizer.from_file(str(tokenizer))
    saved.enable_truncation(7)
    saved.enable_padding(length=99, pad_token="<s>", pad_id=saved.token_to_id("<s>"))
    saved.save(str(tmp_path / "tokenizer.json"))
    codec = TokenizerCodec(str(tmp_path / "tokenizer.json"), None, "replace")
    text = "There are many dogs.\n" * 40_000  # long enough to be tokenized in several pieces
    assert codec.encode("a word") == plain.encode("a word")
    assert np.array_equal(codec.encode_file(text.encode(), "one"), plain.encode_file(text.encode(), "one"))
    template = ChatTemplate(of("an end token", False), {}, "mine")
    rendered = [render_chat(template, CHATS[name]) for name in ("one turn", "several turns")]
    for found, wanted in zip(
        ChatEncoder(codec, template)(rendered), ChatEncoder(plain, template)(rendered), strict=True
    ):
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert found.loss_mask.tolist() == wanted.loss_mask.tolist()


def test_answer_in_first_message_is_trained_on(tokenizer):
    """Check a template that reads `messages[0]`, as those of Llama 3 and Qwen, and so rejects an empty conversation."""
    source = "{% if messages[0]['role'] == 'system' %}S{% else %}<s>{% endif %}" + of("an end token", False)
    codec, template = TokenizerCodec(str(tokenizer), None, "replace"), ChatTemplate(source, {}, "mine")
    chat = [{"role": "assistant", "content": "Hi!"}, *CHATS["one turn"]]
    (found,) = ChatEncoder(codec, template)([render_chat(template, chat)])
    trained_text = codec.decode_special(found.tokens[found.loss_mask].tolist())
    assert trained_text == "Hi!<|end|>There are 3 of them, é.<|end|>"
    deaf = ChatTemplate("{{ messages[0]['role'] }}", {}, "mine")  # renders no answer, so no answer can be located
    with pytest.raises(TemplateRefusal, match="no element 0"):
        render_chat(deaf, chat)


CALL = [USER, {"role": "assistant", "content": "x", "tool_calls": ["f(1)"]}, {"role": "tool", "content": "2"}]
TURN = "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' }}ANSWER{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
FIRST = "(m.tool_calls or [''])[0]"
CALLED = "{% if m.tool_calls %}THEN{% else %}{{ m.content }}{% endif %}"
# name -> (template text in place of ANSWER, text trained on in CALL followed by a plain answer)
ENDS = {
    "a filter changes the words": (f"{{{{ (m.content ~ {FIRST}) | upper }}}}<|end|>{{{{ '\n' }}}}",
        "XF(1)<|end|>DONE<|end|>"),
    "a call in the place of words": (CALLED.replace("THEN", "<s>{{ m.tool_calls[0] }}<s>") + "<|end|>{{ '\n' }}",
        "<s>f(1)<s><|end|>done<|end|>"),
    "a call that nothing ends": ("{{ m.content }}{% if m.tool_calls %}<s>{{ m.tool_calls[0] }}{% else %}<|end|>"
        "{% endif %}{{ '\n' }}", "x<s>f(1)\ndone<|end|>"),
    "a call behind words": ("{{ m.content }}{% if m.tool_calls %}<s>{{ m.tool_calls[0] }}{% endif %}<|end|>{{ '\n' }}",
        "x<s>f(1)<|end|>done<|end|>"),
    "the next turn's begin": (f"{{{{ m.content ~ {FIRST} }}}}<|end|><|turn|>", "xf(1)<|end|>done<|end|>"),
}  # fmt: skip


@pytest.mark.parametrize("shape", ENDS)
def test_tool_call_answer_ends_like_plain_answer(tokenizer, shape):
    answer, wanted = ENDS[shape]
    template = ChatTemplate(TURN.replace("ANSWER", answer) + PROMPT, {"eos_token": "<|end|>"}, "mine")
    codec = TokenizerCodec(str(tokenizer), None, "replace")
    (found,) = ChatEncoder(codec, template)([render_chat(template, [*CALL, {"role": "assistant", "content": "done"}])])
    assert codec.decode_special(found.tokens[found.loss_mask].tolist()) == wanted


@pytest.mark.parametrize("marks", [False, True])
def test_template_that_drops_tool_calls_is_refused(marks):
    """Check templates that would train on an empty answer in place of the tool call."""
    answer = "{% generation %}{{ m.content }}<|end|>{% endgeneration %}" if marks else "{{ m.content }}<|end|>"
    silent = {"role": "assistant", "content": "", "tool_calls": ["f(1)"]}
    chat = [USER, silent, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "done"}]
    template = ChatTemplate(TURN.replace("ANSWER", answer) + PROMPT, {}, "mine")
    for calls in (CALL, chat, [*CALL, *chat]):
        with pytest.raises(TemplateRefusal, match="omits tool calls"):
            render_chat(template, calls)
    assert render_chat(template, [{**one, "tool_calls": None} for one in chat]).answers
    strict = "{% if not m.content and not m.tool_calls %}{{ raise_exception('no words') }}{% endif %}" + CALLED
    template = ChatTemplate(
        TURN.replace("ANSWER", strict.replace("THEN", "{{ m.tool_calls[0] }}")) + PROMPT, {}, "mine"
    )
    assert "f(1)" in render_chat(template, chat).text


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_template_that_drops_final_reasoning_is_refused(field):
    """Check also that a template may omit the reasoning of earlier turns, as templates do on purpose."""
    thought = {"role": "assistant", "content": "4", field: "2 and 2 are 4"}
    leaves_out = ChatTemplate(TURN.replace("ANSWER", "{{ m.content }}<|end|>") + PROMPT, {}, "mine")
    with pytest.raises(TemplateRefusal, match=f"omits the field {field}"):
        render_chat(leaves_out, [USER, thought])
    assert render_chat(leaves_out, [USER, thought, USER, {"role": "assistant", "content": "5", field: " "}]).answers
    writes = f"{{% if loop.last %}}{{{{ m.{field} }}}}{{% endif %}}{{{{ m.content }}}}<|end|>"
    template = ChatTemplate(TURN.replace("ANSWER", writes) + PROMPT, {}, "mine")
    assert "2 and 2 are 4" in render_chat(template, [USER, thought]).text


def test_reasoning_within_answer_text_counts_as_rendered():
    """Check reasoning stored in a field and in the answer: a template without the field renders it in the answer."""
    thought = "2 and 2 are 4"
    answer = {"role": "assistant", "content": f"<think>{thought}</think>4", "reasoning_content": f"{thought}\n"}
    template = ChatTemplate(TURN.replace("ANSWER", "{{ m.content }}<|end|>") + PROMPT, {}, "mine")
    assert thought in render_chat(template, [USER, answer]).text
    strips = "{{ m.content.split('</think>')[-1] }}<|end|>"
    template = ChatTemplate(TURN.replace("ANSWER", strips) + PROMPT, {}, "mine")
    with pytest.raises(TemplateRefusal, match="omits the field reasoning_content"):
        render_chat(template, [USER, answer])


PLAIN = TURN.replace("ANSWER", "{{ m.content }}<|end|>") + PROMPT


def test_reasoning_of_untrained_answer_may_be_dropped():
    thought = {"role": "assistant", "content": "4", "reasoning": "2 and 2 are 4"}
    template = ChatTemplate(PLAIN, {}, "mine")
    chat = [USER, {"role": "assistant", "content": "5"}, {**thought, "weight": 0}]
    assert len(render_chat(template, chat).answers) == 1
    assert (
        len(render_chat(template, [USER, {**thought, "weight": 0}, {"role": "assistant", "content": "5"}]).answers) == 1
    )
    assert render_chat(template, [USER, thought, {"role": "assistant", "content": "5"}], first=2).answers


def test_reasoning_in_parts_is_rendered_or_refused():
    parts = [{"type": "text", "text": "2 and 2"}, {"type": "text", "text": "are 4"}]
    chat = [USER, {"role": "assistant", "content": "", "thinking": parts}]
    texts = "{% if m.thinking is string %}{{ m.thinking }}{% endif %}{{ m.content }}"
    one = "{% if m.thinking %}{{ m.thinking[0].text }}{% endif %}{{ m.content }}"
    for writes in (texts, one):
        template = ChatTemplate(TURN.replace("ANSWER", writes) + PROMPT, {}, "mine")
        with pytest.raises(TemplateRefusal, match="omits the field thinking"):
            render_chat(template, chat)
    every = "{% for part in m.thinking or [] %}{{ part.text }}{% endfor %}{{ m.content }}"
    assert "are 4" in render_chat(ChatTemplate(TURN.replace("ANSWER", every) + PROMPT, {}, "mine"), chat).text
    upper = "{% for part in m.thinking or [] %}{{ part.text | upper }}{% endfor %}{{ m.content }}"
    assert "ARE 4" in render_chat(ChatTemplate(TURN.replace("ANSWER", upper) + PROMPT, {}, "mine"), chat).text


def test_reasoning_with_tool_call_is_rendered_or_refused():
    """Check the turn after the last user message; a template may omit the reasoning of earlier turns."""
    calls = "{{ m.content }}{{ (m.tool_calls or [''])[0] }}<|end|>"
    thought = [USER, {**CALL[1], "reasoning_content": "a sum"}, CALL[2]]
    answer = {"role": "assistant", "content": "done"}
    template = ChatTemplate(TURN.replace("ANSWER", calls) + PROMPT, {}, "mine")
    for chat in (thought, thought[:2], [*thought, answer]):
        with pytest.raises(TemplateRefusal, match="omits the field reasoning_content"):
            render_chat(template, chat)
    assert render_chat(template, [*thought, answer, USER, answer]).answers
    writes = ChatTemplate(TURN.replace("ANSWER", "{{ m.reasoning_content }}" + calls) + PROMPT, {}, "mine")
    assert "a sum" in render_chat(writes, [*thought, answer]).text


def test_template_that_requires_reasoning_renders_reasoning():
    """Check templates that raise an error without reasoning: such an error must not count as omitted reasoning."""
    refuses = "{% if not m.thinking %}{{ raise_exception('no thought') }}{% endif %}{{ m.thinking }}"
    for thought in (refuses, "{{ '' + m.thinking }}"):
        writes = f"{{% if m.role == 'assistant' %}}{thought}{{% endif %}}{{{{ m.content }}}}<|end|>"
        template = ChatTemplate(TURN.replace("ANSWER", writes) + PROMPT, {}, "mine")
        chat = [USER, {"role": "assistant", "content": "4", "thinking": "2 and 2 are 4"}]
        assert "2 and 2 are 4" in render_chat(template, chat).text


def test_non_special_added_end_token_ends_answer(tokenizer, tmp_path):
    made = Tokenizer.from_file(str(tokenizer))
    made.add_tokens([AddedToken("<|stop|>", special=False), AddedToken("   ", special=False)])
    made.save(str(tmp_path / "tokenizer.json"))
    codec = TokenizerCodec(str(tmp_path / "tokenizer.json"), None, "replace")
    for behind, trained_text in (("<|stop|>{{ '\n' }}", "x<|stop|>"), ("{{ '\n   \n' }}", "x\n   \n")):
        template = ChatTemplate(TURN.replace("ANSWER", "{{ m.content }}" + behind) + PROMPT, {}, "mine")
        (found,) = ChatEncoder(codec, template)([render_chat(template, [USER, {"role": "assistant", "content": "x"}])])
        assert codec.decode_special(found.tokens[found.loss_mask].tolist()) == trained_text


def test_byte_codec_trains_on_complete_end_marker():
    template = ChatTemplate(of("an end token and a line's end", False), {}, "mine")
    codec = ByteCodec(None)
    (found,) = ChatEncoder(codec, template)([render_chat(template, CHATS["several turns"])])
    trained_text = bytes(found.tokens[found.loss_mask].tolist()).decode()
    assert trained_text == "3<|end|>\n four 🐕 <|end|>\n", "without special bytes, only the end of an answer is added"


def test_answers_before_first_index_are_not_trained_on(tokenizer):
    codec, chat = TokenizerCodec(str(tokenizer), None, "replace"), CHATS["several turns"]
    for marks in (True, False):
        template = ChatTemplate(of("an end token", marks), {}, "mine")
        (found,) = ChatEncoder(codec, template)([render_chat(template, chat, first=3)])
        assert codec.decode_special(found.tokens[found.loss_mask].tolist()) == " four 🐕 <|end|>"


@pytest.mark.parametrize("marks", [True, False])
def test_answer_of_weight_0_is_not_trained_on(tokenizer, marks):
    codec, chat = TokenizerCodec(str(tokenizer), None, "replace"), CHATS["several turns"]
    template = ChatTemplate(of("an end token", marks), {}, "mine")
    for weights, wanted in (
        ((1, 0), "3<|end|>"),
        ((0, 1), " four 🐕 <|end|>"),
        ((0, 0), ""),
        ((0.0, None), "4<|end|>"),
    ):
        weighted = [USER, {**chat[1], "weight": weights[0]}, USER, {**chat[3], "weight": weights[1]}]
        if weights[1] is None:
            weighted[3] = {"role": "assistant", "content": "4"}
        (found,) = ChatEncoder(codec, template)([render_chat(template, parse_messages(weighted, "row 1"))])
        assert codec.decode_special(found.tokens[found.loss_mask].tolist()) == wanted
    with pytest.raises(UserError, match=r"row 1 has a message with weight 0\.5"):
        parse_messages([{**chat[1], "weight": 0.5}], "row 1")


def test_weights_with_incomplete_answer_marks_are_refused():
    last = "{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}"
    chat = [{"role": "assistant", "content": "3", "weight": 0}, USER, {"role": "assistant", "content": "4"}]
    with pytest.raises(TemplateRefusal, match="does not mark each answer once"):
        render_chat(ChatTemplate(f"{{% for m in messages %}}{last}{{% endfor %}}", {}, "mine"), chat)


def test_template_without_locatable_answers_is_refused():
    thinks = "{% for m in messages %}[{{ m.role }}{{ ' thinks' if loop.last else '' }}:{{ m.content }}]{% endfor %}"
    with pytest.raises(TemplateRefusal, match="earlier turns"):
        render_chat(ChatTemplate(thinks, {}, "mine"), CHATS["several turns"])
    with pytest.raises(TemplateRefusal, match="half of a surrogate pair"):
        render_chat(
            ChatTemplate(of("an end token", False), {}, "mine"), [USER, {"role": "assistant", "content": "\ud800"}]
        )
    found = ChatEncoder(ByteCodec(None), ChatTemplate("x", {}, "mine"))([])
    assert found == []
    assert np.dtype(np.uint8) == ByteCodec.dtype
