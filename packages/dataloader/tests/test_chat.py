"""Conversations in token stores: chat templates, loss mask of assistant answers, refused stores and options."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gangline.config.check import find_problems
from gangline.errors import UserError
from gangline_basics.data.chat import read_template
from gangline_basics.data.chat_tokens import LOSS_MASK_RULE
from gangline_basics.data.codec import TokenizerCodec
from gangline_basics.sampling.sampler import Sampler
from gangline_dataloader import commands
from gangline_dataloader.prepare.documents import TextDocument
from gangline_dataloader.prepare.encode import DocumentEncoder, EncodedDocument
from gangline_dataloader.prepare.rule import Dropped
from gangline_dataloader.prepare.settings import TOKENIZERS, Settings, copy_tokenizer
from gangline_dataloader.sources import build
from gangline_dataloader.store.fields import add_checksum
from gangline_dataloader.store.local import LocalTokens
from gangline_dataloader.store.manifest import read
from gangline_testkit.runs import build_small_run
from gangline_testkit.sessions import train_session

TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""


def talk(number: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": f"You count. {number}"},
        {"role": "user", "content": "How many dögs?"},
        {"role": "assistant", "content": f"There are {number} of them, é."},
        {"role": "user", "content": "And cats?"},
        {"role": "assistant", "content": f"None, {number} times."},
    ]


def trained_text(number: int, behind: str = "") -> str:
    return f"There are {number} of them, é.<|im_end|>{behind}None, {number} times.<|im_end|>{behind}"


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [{"messages": talk(number)} for number in range(40)]
    rows += [{"messages": talk(0)}, {"messages": talk(1)[:2]}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "chats.jsonl"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Return a byte-level BPE tokenizer trained on the conversations, with its chat template next to it."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([message["content"] for n in range(9) for message in talk(n)], trainer)
    made.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": {"content": "<|im_end|>"}, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def prepared(chats: Path, *more: str) -> Path:
    out = chats.parent / "store"
    assert commands.main(["prepare", str(chats), "--out", str(out), "--chat", "--workers", "1", *more]) == 0
    return out


def test_tokenizer_symlink_is_not_copied_into_store(tokenizer, tmp_path):
    (tmp_path / "private.json").write_text('{"eos_token": "a key"}')
    (tokenizer.parent / "special_tokens_map.json").symlink_to(tmp_path / "private.json")
    with pytest.raises(UserError, match=r"special_tokens_map\.json is a symbolic link to a file outside"):
        copy_tokenizer(Settings(tokenizer=str(tokenizer)), tmp_path)


@pytest.mark.parametrize("subwords", [True, False])
def test_loss_mask_covers_assistant_answers(chats, tokenizer, tmp_path, subwords):
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    how = ["--tokenizer", str(tokenizer)] if subwords else ["--chat-template", str(tmp_path / "mine.jinja")]
    folder = prepared(chats, *how, "--validation", "0", "--pack", "200")
    count = read(folder).report["by_source"][str(chats)]
    assert (count["kept"], count["dropped"]) == (40, {"chat: no answer": 1, "duplicate": 1})
    store = LocalTokens(folder)
    assert store.masked
    codec = build.open_codec(store)
    tokens, counted = np.empty((1, store.total), store.dtype), np.empty(store.total, np.uint8)
    store.copy_windows(np.array([0]), store.total, tokens)
    store.copy_loss_mask(np.array([0]), np.array([store.total]), counted, np.array([0]))
    ends = store.find_document_ends(0, store.total)
    numbers = set()
    for document, marks in zip(np.split(tokens[0], ends[:-1]), np.split(counted, ends[:-1]), strict=True):
        ids = document[marks.astype(bool)].tolist()
        said = codec.tokenizer.decode(ids, skip_special_tokens=False) if subwords else codec.decode(ids)
        number = int(said.split()[2])
        # Without a tokenizer, tokens are bytes and no token is special, so an answer includes the newline that ends it.
        assert said == trained_text(number, "" if subwords else "\n")
        numbers.add(number)
        assert not marks[-1]
    assert numbers == set(range(40))


def test_answers_with_weight_0_are_not_trained_on(tokenizer, tmp_path):
    rows = [talk(7), talk(8)]
    rows[0][2]["weight"], rows[0][4]["weight"], rows[1][2]["weight"], rows[1][4]["weight"] = 0, 1, 0, 0
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": one}) for one in rows))
    folder = prepared(tmp_path / "chats.jsonl", "--tokenizer", str(tokenizer), "--validation", "0")
    assert read(folder).report["by_source"][str(tmp_path / "chats.jsonl")]["dropped"] == {"chat: no answer": 1}
    store = LocalTokens(folder)
    tokens, counted = np.empty((1, store.total), store.dtype), np.empty(store.total, np.uint8)
    store.copy_windows(np.array([0]), store.total, tokens)
    store.copy_loss_mask(np.array([0]), np.array([store.total]), counted, np.array([0]))
    said = build.open_codec(store).tokenizer.decode(tokens[0][counted.astype(bool)].tolist(), skip_special_tokens=False)
    assert said == "None, 7 times.<|im_end|>"


def test_conversation_with_different_weight_is_not_duplicate(tokenizer, tmp_path):
    """Check duplicates within one call, and of the store in an append."""
    rows = [talk(7), talk(7), talk(7), talk(7)]
    rows[1][2]["weight"] = rows[3][2]["weight"] = 0
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": one}) for one in rows))
    folder = prepared(tmp_path / "chats.jsonl", "--tokenizer", str(tokenizer), "--validation", "0")
    count = read(folder).report["by_source"][str(tmp_path / "chats.jsonl")]
    assert (count["kept"], count["dropped"]) == (2, {"duplicate": 2})
    rows[0][4]["weight"] = 0
    (tmp_path / "more.jsonl").write_text("\n".join(json.dumps({"messages": one}) for one in rows))
    words = ["prepare", str(tmp_path / "more.jsonl"), "--out", str(folder), "--append", "--workers", "1"]
    assert commands.main([*words, "--validation", "0"]) == 0
    count = read(folder).report["by_source"][str(tmp_path / "more.jsonl")]
    assert (count["kept"], count["dropped"]) == (1, {"duplicate": 3})


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("apart", [False, True])
def test_run_loss_mask_matches_stored_mask(chats, tokenizer, packing, apart):
    folder = prepared(chats, "--tokenizer", str(tokenizer), "--validation", "0", "--pack", "200")
    asked = ("model.vocab_size=330", "batch.sequence_length=200", "data=tokens", f"data.path={folder}")
    run = build_small_run(*asked, f"data.packing={packing}", f"data.document_masking={str(apart).lower()}")
    assert find_problems(run) == []
    source = build.build_tokens(run.data, run, "train")
    for i in range(source.count_samples()):
        sample = source.sample(i)
        index, row = source.locate_sample(i)
        wanted = np.zeros(200, bool)
        at = 0
        for start, stop in source.list_token_ranges(index, row):
            counted = np.empty(stop - start, np.uint8)
            source.stores[index].copy_loss_mask(np.array([start]), np.array([stop]), counted, np.array([0]))
            for place in np.flatnonzero(counted) + at:
                if place > 0:
                    wanted[place - 1] = True
            at += stop - start
        # The first token of a conversation is never trained on, so document ends remove no target.
        assert np.array_equal(sample["loss_mask"], wanted)
        assert sample["loss_mask"].any()


def encoded(tokenizer: Path, template: str, messages: list[dict[str, str]]) -> EncodedDocument | Dropped:
    """Encode one conversation with this template instead of the tokenizer's."""
    (tokenizer.parent / "chat_template.jinja").write_text(template)
    encode = DocumentEncoder(Settings(tokenizer=str(tokenizer), chat=True), TOKENIZERS)
    return encode(TextDocument("", "one", messages))


def test_conversation_is_dropped_if_template_rewrites_earlier_turns(tokenizer):
    """Check a template like those that omit reasoning of earlier turns, one that raises, and one that marks no text."""
    template = "{% for m in messages %}[{{ m.role }}{{ ' thinks' if loop.last else '' }}:{{ m.content }}]{% endfor %}"
    found = encoded(tokenizer, template, talk(3))
    assert found == Dropped("chat: the template renders earlier turns differently if more turns follow")
    strict = "{{ raise_exception('roles must alternate') }}"
    assert encoded(tokenizer, strict, talk(3)) == Dropped("chat: roles must alternate")
    marks_none = "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"
    assert encoded(tokenizer, marks_none, talk(3)) == Dropped("chat: nothing to learn")


CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}{{ m.reasoning_content }}"
    "{% endif %}{{ m.content }}{% for call in m.tool_calls or () %}{{ call | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
)
CALLING = [
    {"role": "system", "content": ""},
    {"role": "user", "content": "Write to me@here.org"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "It is me@here.org",
        "tool_calls": [{"function": {"name": "mail", "arguments": {"to": ["me@here.org"], "at": "10.0.0.1", "n": 1}}}],
    },
    {"role": "tool", "content": "sent"},
    {"role": "assistant", "content": "Done."},
]


def test_tool_calls_with_empty_content_are_trained_on(tokenizer):
    found = encoded(tokenizer, CALLS + PROMPT, CALLING)
    assert isinstance(found, EncodedDocument)
    assert found.text.startswith("<|im_start|>system\n<|im_end|>\n")
    assert '"n": 1' in found.text
    nothing = [{**message, "content": " "} for message in talk(1)]
    assert encoded(tokenizer, CALLS + PROMPT, nothing) == Dropped("empty")


NAMES_TOOLS = "{% for tool in tools or () %}{{ tool.name }} {{ tool.by }}: {% endfor %}" + CALLS


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_tools_column_is_rendered_into_prompt(tokenizer, tmp_path, kind):
    (tokenizer.parent / "chat_template.jinja").write_text(NAMES_TOOLS + PROMPT)
    silent = {"role": "assistant", "content": None, "tool_calls": [{"name": "count"}]}
    rows = [
        {"messages": talk(1), "tools": [{"name": "count", "by": "me@here.org"}]},
        {"messages": [*talk(2)[:2], silent], "tools": None},
    ]
    path = tmp_path / f"chats.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows), path)
    how = ("--tokenizer", str(tokenizer), "--validation", "0", "--replace", "email")
    store = LocalTokens(prepared(path, *how))
    tokens = np.empty((1, store.total), store.dtype)
    store.copy_windows(np.array([0]), store.total, tokens)
    codec = TokenizerCodec(str(tokenizer), None, "replace")
    text = codec.decode_special(tokens[0].tolist())
    assert text.count("count EMAIL_ADDRESS: <|im_start|>system") == 1
    assert text.count('{"name": "count"}<|im_end|>') == 1


def test_private_data_is_replaced_in_rendered_template(tokenizer):
    (tokenizer.parent / "chat_template.jinja").write_text(CALLS + PROMPT)
    settings = Settings(tokenizer=str(tokenizer), chat=True, private=("email", "ip"))
    found = DocumentEncoder(settings, TOKENIZERS)(TextDocument("", "one", CALLING))
    assert isinstance(found, EncodedDocument)
    assert "me@here.org" not in found.text
    assert found.text.count("EMAIL_ADDRESS") == 3
    assert found.replaced == {"email": 3, "ip": 1}
    codec = TokenizerCodec(str(tokenizer), None, "replace")
    assert "here.org" not in codec.decode_special(found.tokens.tolist())
    assert CALLING[1]["content"] == "Write to me@here.org", "the document itself is as it was"


def test_template_is_sandboxed(tokenizer):
    template = "{{ messages.__class__.__mro__[-1].__subclasses__() }}"
    assert isinstance(encoded(tokenizer, template, talk(1)), Dropped)


LINES = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.mark.parametrize("marks", [True, False])
def test_loss_mask_matches_transformers_assistant_mask(tokenizer, marks):
    """Check a template with generation marks, and one without, which must give the same mask."""
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), chat_template=MARKED + PROMPT)
    for number in range(5):
        for messages in (talk(number), talk(number)[1:3], talk(number)[1:]):
            found = encoded(tokenizer, (MARKED if marks else LINES) + PROMPT, messages)
            asked = {"return_dict": True, "return_assistant_tokens_mask": True}
            wanted = theirs.apply_chat_template(messages, **asked)
            assert isinstance(found, EncodedDocument)
            assert found.tokens.tolist() == [*wanted["input_ids"], 0]
            assert found.counted is not None
            assert found.counted.tolist() == [*map(bool, wanted["assistant_masks"]), False]
            assert found.counted.any()


def test_invalid_conversations_and_templates_are_refused(chats, tokenizer, tmp_path):
    def refused(path: Path, *more: str) -> str:
        with pytest.raises(UserError) as error:
            commands.main(["prepare", str(path), "--out", str(tmp_path / "none"), "--workers", "1", *more])
        return str(error.value)

    assert "a chat template is missing for" in refused(chats, "--chat")
    (tmp_path / "bad.jinja").write_text("{% for")
    assert "is not a valid chat template" in refused(chats, "--chat", "--chat-template", str(tmp_path / "bad.jinja"))
    assert "--chat-template requires --chat" in refused(chats, "--chat-template", str(tmp_path / "bad.jinja"))
    there = ("--chat", "--tokenizer", str(tokenizer))
    for row, why in (
        ({"messages": "hello"}, "line 1, is not a conversation"),
        ({"messages": [{"content": "x"}]}, "without a role"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is not a string"),
        ({"text": "x"}, "no field 'messages'"),
    ):
        (tmp_path / "one.jsonl").write_text(json.dumps(row))
        assert why in refused(tmp_path / "one.jsonl", *there)
    (tmp_path / "some.txt").write_text("x")
    assert "must be JSONL or Parquet" in refused(tmp_path / "some.txt", *there)


def test_fill_in_the_middle_refuses_conversations(chats, tokenizer):
    folder = prepared(chats, "--tokenizer", str(tokenizer), "--validation", "0")
    asked = ("model.vocab_size=330", "batch.sequence_length=64", "data=tokens", f"data.path={folder}")
    (problem,) = find_problems(build_small_run(*asked, "data.fim_rate=0.5"))
    assert "does not support stores of conversations" in problem.what


def test_fill_in_the_middle_refuses_mixture_with_chat(chats, tokenizer, make_store):
    """Check that the error names the store before the run starts: its loss mask does not fit rearranged tokens."""
    (chats.parent / "code").mkdir()
    (chats.parent / "code" / "a.txt").write_text("def count(dogs): return len(dogs) " * 99)
    talks = prepared(chats, "--tokenizer", str(tokenizer), "--validation", "0")
    code = make_store(chats.parent / "code", tokenizer=str(tokenizer), end_of_text="<|endoftext|>")
    marks = "data.fim_tokens=[<|endoftext|>,<|im_start|>,<|im_end|>]"
    for names in (("chat", "code"), ("web", "code")):
        sources = (f"data.sources.{name}={path}" for name, path in zip(names, (talks, code), strict=True))
        sizes = ("model.vocab_size=330", "batch.sequence_length=64", "data=mix", "data.fim_rate=0.5", marks)
        run = build_small_run(*sizes, *sources)
        (problem,) = find_problems(run)
        assert "does not support stores of conversations" in problem.what
        assert str(talks) in problem.why
        with pytest.raises(UserError, match="does not support stores of conversations"):
            build.build_mix(run.data, run, "train")


def test_export_refuses_conversations_with_loss_mask(chats, tokenizer, tmp_path):
    folder = prepared(chats, "--tokenizer", str(tokenizer), "--validation", "0")
    with pytest.raises(UserError, match="holds conversations"):
        commands.main(["export", str(folder), "--out", str(tmp_path / "out")])
    assert not list(tmp_path.glob("*out*"))


def test_verify_detects_changed_loss_mask(chats, tokenizer, capsys):
    folder = prepared(chats, "--tokenizer", str(tokenizer))
    path = folder / "shard-00000.loss.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert commands.main(["verify", str(folder)]) == 1
    assert "loss.npy: the checksum differs from the manifest" in capsys.readouterr().out


def test_begin_of_text_precedes_each_document(texts, make_store):
    folder = make_store(texts, begin_of_text="^")
    store = LocalTokens(folder)
    tokens = np.empty((1, store.total), store.dtype)
    store.copy_windows(np.array([0]), store.total, tokens)
    begins = np.concatenate([[0], store.find_document_ends(0, store.total)[:-1]])
    assert set(tokens[0][begins].tolist()) == {ord("^")}
    with pytest.raises(UserError, match="--begin-of-text"):
        make_store(texts, begin_of_text="two")


def test_run_uses_tokenizer_and_template_of_store(chats, tokenizer, tmp_path):
    folder = prepared(chats, "--tokenizer", str(tokenizer))
    wanted = read_template(str(tokenizer))
    named = ["model.vocab_size=330", "data=tokens", f"data.path={folder}"]
    mixed = ["model.vocab_size=330", "data=mix", f"data.sources.chat={folder}"]
    for asked in (named, mixed):
        run = build_small_run(*asked)
        codec, template = run.data.build_codec(run), run.data.build_chat_template(run)
        assert isinstance(codec, TokenizerCodec)
        assert template is not None
        assert codec.encode("dögs") == TokenizerCodec(str(tokenizer), None, "replace").encode("dögs")
        assert (template.source, template.special) == (wanted.source, wanted.special)
        assert set(run.data.export_files(run)) >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
        assert run.data.list_notices(run) == []
    assert {path.name for path in (folder / "validation").iterdir()} >= {"chat_template.jinja"}
    other = tmp_path / "other"
    other.mkdir()
    (other / "chat.jinja").write_text(LINES)
    (other / "chats.jsonl").write_text(chats.read_text())
    there = prepared(other / "chats.jsonl", "--tokenizer", str(tokenizer), "--chat-template", str(other / "chat.jinja"))
    run = build_small_run(*mixed, f"data.sources.other={there}")
    with pytest.raises(UserError, match="different chat templates"):
        run.data.build_chat_template(run)


def test_conversation_with_lone_surrogate_is_dropped(chats, tokenizer):
    """Check that the text is judged before --clean removes the surrogate, and whatever the template writes."""
    chats.write_text(
        "\n".join(json.dumps({"messages": talk(n)}) for n in range(3)).replace("1 times", "1\\ud800 times")
    )
    folder = prepared(chats, "--tokenizer", str(tokenizer), "--validation", "0")
    count = read(folder).report["by_source"][str(chats)]
    assert (count["kept"], count["dropped"]) == (2, {"chat: the text contains half of a surrogate pair": 1})


def test_append_refuses_store_with_older_loss_mask_rule(chats, tokenizer):
    folder = prepared(chats, "--tokenizer", str(tokenizer))
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest.pop("loss_mask_rule") == LOSS_MASK_RULE
    path.write_text(json.dumps(add_checksum(manifest)))
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / name).unlink()
    run = build_small_run("model.vocab_size=330", "data=tokens", f"data.path={folder}")
    (notice,) = run.data.list_notices(run)
    assert f"{folder} was prepared by an older rule" in notice
    with pytest.raises(UserError, match=r"has no chat template") as error:
        run.data.build_chat_template(run)
    assert "by an older version, which did not store the chat template" in str(error.value)
    more = chats.parent / "more.jsonl"
    more.write_text(json.dumps({"messages": talk(99)}))
    with pytest.raises(UserError, match="older rule"):
        commands.main(["prepare", str(more), "--out", str(folder), "--append", "--tokenizer", str(tokenizer)])


def test_prepare_ignores_truncation_of_a_tokenizer(tokenizer, tmp_path):
    said = json.loads(tokenizer.read_text())
    said["truncation"] = {"direction": "Right", "max_length": 7, "strategy": "LongestFirst", "stride": 0}
    cutting = tmp_path / "cutting" / "tokenizer.json"
    cutting.parent.mkdir()
    cutting.write_text(json.dumps(said))
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"dogs and cats {n}, and no end of them"}) + "\n" for n in range(40)))
    plain, other = (tmp_path / name for name in ("plain", "other"))
    for folder, file in ((plain, tokenizer), (other, cutting)):
        words = ["prepare", str(texts), "--tokenizer", str(file)]
        assert commands.main([*words, "--out", str(folder)]) == 0
    tokens = [np.load(folder / "shard-00000.npy") for folder in (plain, other)]
    assert np.array_equal(*tokens)


def test_append_uses_chat_template_of_store(chats, tokenizer, tmp_path):
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    folder = prepared(chats, "--tokenizer", str(tokenizer), "--chat-template", str(tmp_path / "mine.jinja"))
    (tmp_path / "mine.jinja").write_text(LINES)
    (tmp_path / "more.jsonl").write_text(json.dumps({"messages": talk(99)}))
    append = ["prepare", str(tmp_path / "more.jsonl"), "--out", str(folder), "--append", "--workers", "1"]
    with pytest.raises(UserError, match="the chat template of the store differs"):
        commands.main([*append, "--chat-template", str(tmp_path / "mine.jinja")])
    before = read(folder).documents
    assert commands.main(append) == 0
    assert read(folder).documents + read(folder / "validation").documents > before


def test_append_refuses_different_special_tokens(chats, tokenizer, tmp_path):
    """Change the config next to an unchanged tokenizer, because templates write special tokens by name."""
    folder = prepared(chats, "--tokenizer", str(tokenizer))
    kept = (folder / "tokenizer_config.json").read_bytes()
    config = json.loads((tokenizer.parent / "tokenizer_config.json").read_text())
    (tokenizer.parent / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<|endoftext|>"}))
    (tmp_path / "more.jsonl").write_text(json.dumps({"messages": talk(99)}))
    append = ["prepare", str(tmp_path / "more.jsonl"), "--out", str(folder), "--append", "--workers", "1"]
    with pytest.raises(UserError, match=r"the special tokens next to .* differ from the store's") as error:
        commands.main([*append, "--tokenizer", str(tokenizer)])
    assert "Store: eos_token <|im_end|>. This call: bos_token <|endoftext|>, eos_token <|im_end|>." in str(error.value)
    assert (folder / "tokenizer_config.json").read_bytes() == kept
    assert commands.main(append) == 0


def test_sampler_uses_chat_template_and_end_tokens(chats, tokenizer, tmp_path):
    folder = prepared(chats, "--tokenizer", str(tokenizer))
    shutil.rmtree(tokenizer.parent)
    asked = ("model.vocab_size=330", "batch.sequence_length=96", "validate.every=null", "run.steps=1")
    assert train_session(tmp_path / "run", *asked, "data=tokens", f"data.path={folder}") == 0
    sampler = Sampler(tmp_path / "run")
    assert sampler.render_chat(talk(1)[:2]).endswith("How many dögs?<|im_end|>\n<|im_start|>assistant\n")
    codec = sampler.codec
    assert isinstance(codec, TokenizerCodec)
    assert sampler.ends == {codec.tokenizer.token_to_id(word) for word in ("<|im_end|>", "<|endoftext|>")}
    (text,) = sampler.write([sampler.render_chat(talk(1)[:2])], 4)
    assert len(text.tokens) <= 4
