"""`data=chat`: tokens and loss mask as in transformers, packing, splits, refused chats and templates."""

from __future__ import annotations

import json

import numpy as np
import pytest
from chats import TEMPLATE, chat, chats, tokenizer, write
from small_models import llama
from transformers import AutoTokenizer

from gangline import UserError
from gangline.config.compose import compose_one
from gangline_finetune.chat.source import build

WORDS = ("recipe=quick", "data=chat", "batch.sequence_length=160")


@pytest.fixture
def words(tmp_path):
    path, file = tokenizer(tmp_path / "model"), chats(tmp_path / "chats.jsonl")
    return [*WORDS, f"data.path={file}", f"data.tokenizer={path}"]


def source(words, split="train"):
    run = compose_one(words)
    return build(run.data, run, split)


def problems(words):
    run = compose_one(words)
    return "\n".join(map(str, run.data.check(run)))


def test_tokens_and_mask_match_transformers(tmp_path, words):
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    ours = source([*words, "data.validation_fraction=0"])
    assert len(ours.chats) == 40
    for number, found in enumerate(ours.chats):
        wanted = theirs.apply_chat_template(
            chat(number, 1 + number % 3), return_dict=True, return_assistant_tokens_mask=True
        )
        assert found.tokens.tolist() == wanted["input_ids"]
        assert found.loss_mask.tolist() == [bool(mark) for mark in wanted["assistant_masks"]]


def answers(words):
    """Return the text of each chat that contributes to the loss."""
    found = source([*words, "data.validation_fraction=0"])
    return [found.codec.decode_special(chat.tokens[chat.loss_mask].tolist()) for chat in found.chats]


LINES = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_loss_mask_includes_end_of_turn_token(tmp_path, words):
    said = [{"role": "user", "content": "<|im_end|> is?"}, {"role": "assistant", "content": "e<|im_start|>e"}]
    write(tmp_path / "chats.jsonl", [{"messages": chat(1, 2)}, {"messages": said}])
    tokenizer(tmp_path / "model", LINES)
    assert answers(words) == ["It is 2.<|im_end|>It is 3.<|im_end|>", "e<|im_start|>e<|im_end|>"]
    tokenizer(tmp_path / "model", LINES.replace("<|im_end|>", ""))
    assert answers(words) == ["It is 2.\nIt is 3.\n", "e<|im_start|>e\n"], "a line's end is all that ends it"


def test_generation_tags_set_loss_mask(tmp_path, words):
    marked = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>' }}{% generation %}{{ m.content + ' ' }}"
        "{% endgeneration %}{{ '<|im_end|>\n' }}{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
    )
    tokenizer(tmp_path / "model", marked)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    for number, found in enumerate(source([*words, "data.validation_fraction=0"]).chats):
        said = theirs.apply_chat_template(
            chat(number, 1 + number % 3), return_dict=True, return_assistant_tokens_mask=True
        )
        assert found.tokens.tolist() == said["input_ids"]
        assert found.loss_mask.tolist() == [bool(mark) for mark in said["assistant_masks"]]


def test_template_failing_on_all_chats_is_refused(tmp_path, words):
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content + 1 }}{% endfor %}")
    told = problems([*words, f"data.template={tmp_path}/mine.jinja"])
    assert "refuses all chats" in told
    assert "TypeError" in told
    (tmp_path / "mine.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    )
    assert problems([*words, f"data.template={tmp_path}/mine.jinja"]) == "", "the first chat alone has a system's turn"


def test_packed_rows_hold_each_chat_once(words):
    ours = source([*words, "data.validation_fraction=0"])
    said = sorted(bytes(c.tokens.astype("<u2")) for c in ours.chats)
    found, trained = [], 0
    for i in range(ours.count_samples()):
        sample = ours.sample(i)
        tokens, document, position = sample["tokens"][:-1], sample["document"], sample["position"]
        trained += sample["loss_mask"].sum()
        for number in np.unique(document):
            here = document == number
            assert position[here].tolist() == list(range(here.sum()))
            ends = here.nonzero()[0][-1] + 1
            piece = np.append(tokens[here], sample["tokens"][-1]) if ends == len(document) else tokens[here]
            for candidate in (piece, tokens[here]):
                if bytes(candidate.astype("<u2")) in said:
                    found.append(bytes(candidate.astype("<u2")))
                    break
    assert sorted(found) == said
    assert trained == sum(c.loss_mask[1:].sum() for c in ours.chats)


def test_validation_chats_are_excluded_from_training(words):
    share = "data.validation_fraction=0.25"
    trained, kept = source([*words, share]).chats, source([*words, share], "validation").chats
    whole = source([*words, "data.validation_fraction=0"]).chats
    assert (len(trained), len(kept)) == (30, 10)
    assert len(source(words, "validation").chats) == 1, "a 50th of 40 chats is held out as one"
    assert sorted(bytes(c.tokens) for c in [*trained, *kept]) == sorted(bytes(c.tokens) for c in whole)


def test_parquet_chats_match_json_lines(tmp_path, words):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
    other = [word.replace("chats.jsonl", "chats.parquet") for word in words]
    assert source(other).compute_fingerprint() == source(words).compute_fingerprint()


def test_tool_calls_contribute_to_loss(tmp_path, words):
    template = (
        "{% for tool in tools or () %}{{ tool | tojson }}{% endfor %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% for call in m.tool_calls or () %}{{ call | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    )
    tokenizer(tmp_path / "model", template + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    rows = [{"messages": [*chat(1)[:1], call], "tools": [{"name": "add"}]}, {"messages": chat(1), "tools": []}]
    write(tmp_path / "chats.jsonl", rows)
    assert problems(words) == ""
    assert answers(words) == ['{"name": "add"}<|im_end|>', "It is 2.<|im_end|>"]
    asked = source([*words, "data.validation_fraction=0"])
    assert asked.codec.decode_special(asked.chats[0].tokens.tolist()).startswith('{"name": "add"}<|im_start|>user')
    write(tmp_path / "chats.jsonl", [{**rows[0], "tools": "add"}])
    assert "line 1 of" in problems(words)
    assert "has an invalid field tools" in problems(words)


def test_bad_chats_are_refused_with_the_line(tmp_path, words):
    bad = {
        "is empty.": [],
        "line 1": [{"text": "no chat"}],
        "line 2 of": [{"messages": chat(1)}, {"messages": []}],
        "has no assistant message to train on": [{"messages": [{"role": "user", "content": "hello?"}]}],
        "assistant message that has content and no weight 0": [
            {"messages": [{**message, "weight": 0} for message in chat(1)]}
        ],
        "message with weight 2": [{"messages": [{**message, "weight": 2} for message in chat(1)]}],
        "without a role": [{"messages": [{"content": "hello?"}]}],
        "is not a string": [{"messages": [{"role": "assistant", "content": 3}]}],
    }
    for told, rows in bad.items():
        write(tmp_path / "chats.jsonl", rows)
        assert told in problems(words), told
    (tmp_path / "chats.jsonl").write_text("{")
    assert "not JSON" in problems(words)


def test_missing_template_or_mismatched_tokenizer_is_refused(tmp_path, words):
    assert problems(words) == ""
    assert "vocab_size" in problems([*words, "model.vocab_size=200"])
    weights = tmp_path / "other"
    tokenizer(weights)
    content = json.loads((weights / "tokenizer.json").read_text())
    content["model"]["vocab"] = {word: 252 - id for word, id in content["model"]["vocab"].items()}
    (weights / "tokenizer.json").write_text(json.dumps(content))
    assert "differs from the tokenizer in model.weights" in problems([*words, f"model.weights={weights}"])
    tokenizer(tmp_path / "model", template=None)
    assert "a chat template is missing for" in problems(words)
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    assert problems([*words, f"data.template={tmp_path}/mine.jinja"]) == ""
    (tmp_path / "mine.jinja").write_text("{% if %}")
    assert "is not a valid chat template" in problems([*words, f"data.template={tmp_path}/mine.jinja"])


def test_sampling_uses_tokenizer_and_template_of_run(tmp_path, words):
    """Check a run without `data.tokenizer`, which uses the tokenizer next to the weights."""
    from gangline_basics.sampling.text import build_codec, find_ends

    llama(tmp_path / "model")
    mine = tmp_path / "mine.jinja"
    mine.write_text("mine{{ eos_token }}")
    kept = [word for word in words if not word.startswith("data.tokenizer")]
    run = compose_one([*kept, f"model.weights={tmp_path}/model", f"data.template={mine}"])
    codec = build_codec(run)
    assert codec.path == str(tmp_path / "model" / "tokenizer.json")
    assert codec.tokenizer.token_to_id("<|im_end|>") in find_ends(run, codec)
    assert run.data.build_chat_template(run).render([]) == "mine<|im_end|>"


def test_template_that_changes_earlier_turns_is_refused(tmp_path, words):
    changing = "{% for m in messages %}{{ m['role'] }}{% if loop.last %}!{% endif %}{{ m['content'] }}\n{% endfor %}"
    (tmp_path / "mine.jinja").write_text(changing)
    with pytest.raises(UserError, match="no chat with assistant tokens in the train split"):
        source([*words, f"data.template={tmp_path}/mine.jinja"])


def test_missing_chat_file_error_does_not_suggest_null(tmp_path, words):
    """Check a missing file: null would select a corpus of plain text or bytes, which are not chats."""
    for word in (f"data.path={tmp_path}/none.jsonl", f"data.tokenizer={tmp_path}/none.json"):
        assert "none.json" in problems([*words, word])
        assert "=null" not in problems([*words, word])


def test_random_initial_weights_are_reported(tmp_path, words):
    run = compose_one(words)
    assert run.data.list_notices(run) == [
        "fine-tuning starts from random weights: neither model.weights nor run.weights is set"
    ]
    for weights in ([f"run.weights={tmp_path}"], llama(tmp_path / "llama")):
        run = compose_one([*words, *weights])
        assert run.data.list_notices(run) == []
