"""`data=chat`: rendered and masked as transformers does it, packed, and refused where it cannot be learnt."""

from __future__ import annotations

import json

import numpy as np
import pytest
from chats import TEMPLATE, chat, chats, tokenizer, write
from transformers import AutoTokenizer

from gangline import UserError
from gangline.config import compose_one
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


def test_tokens_and_mask_are_those_of_transformers(tmp_path, words):
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    ours = source([*words, "data.validation_fraction=0"])
    assert len(ours.chats) == 40
    for number, found in enumerate(ours.chats):
        wanted = theirs.apply_chat_template(
            chat(number, 1 + number % 3), return_dict=True, return_assistant_tokens_mask=True
        )
        assert found.tokens.tolist() == wanted["input_ids"]
        assert found.learnt.tolist() == [bool(mark) for mark in wanted["assistant_masks"]]


def test_rows_hold_whole_chats_apart_and_every_chat_once(words):
    ours = source([*words, "data.validation_fraction=0"])
    said = sorted(bytes(c.tokens.astype("<u2")) for c in ours.chats)
    found, learnt = [], 0
    for i in range(ours.length()):
        sample = ours.sample(i)
        tokens, document, position = sample["tokens"][:-1], sample["document"], sample["position"]
        learnt += sample["loss_mask"].sum()
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
    assert learnt == sum(c.learnt[1:].sum() for c in ours.chats)


def test_what_is_held_out_is_not_trained_on(words):
    share = "data.validation_fraction=0.25"
    trained, kept = source([*words, share]).chats, source([*words, share], "validation").chats
    whole = source([*words, "data.validation_fraction=0"]).chats
    assert (len(trained), len(kept)) == (30, 10)
    assert len(source(words, "validation").chats) == 1, "a 50th of 40 chats is held out as one"
    assert sorted(bytes(c.tokens) for c in [*trained, *kept]) == sorted(bytes(c.tokens) for c in whole)


def test_parquet_holds_the_same_chats(tmp_path, words):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
    other = [word.replace("chats.jsonl", "chats.parquet") for word in words]
    assert source(other).fingerprint() == source(words).fingerprint()


def test_bad_chats_are_refused_with_the_line(tmp_path, words):
    bad = {
        "is empty.": [],
        "line 1": [{"text": "no chat"}],
        "line 2 of": [{"messages": chat(1)}, {"messages": []}],
        "nothing that an assistant says": [{"messages": [{"role": "user", "content": "hello?"}]}],
        "without a role": [{"messages": [{"content": "hello?"}]}],
        "no text": [{"messages": [{"role": "assistant", "content": 3}]}],
    }
    for told, rows in bad.items():
        write(tmp_path / "chats.jsonl", rows)
        assert told in problems(words), told
    (tmp_path / "chats.jsonl").write_text("{")
    assert "not JSON" in problems(words)


def test_a_tokenizer_without_a_template_or_of_another_model_is_refused(tmp_path, words):
    assert problems(words) == ""
    assert "vocab_size" in problems([*words, "model.vocab_size=200"])
    weights = tmp_path / "other"
    tokenizer(weights)
    content = json.loads((weights / "tokenizer.json").read_text())
    content["model"]["vocab"] = {word: 252 - id for word, id in content["model"]["vocab"].items()}
    (weights / "tokenizer.json").write_text(json.dumps(content))
    assert "is another model's" in problems([*words, f"model.weights={weights}"])
    tokenizer(tmp_path / "model", template=None)
    assert "has no chat template" in problems(words)
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    assert problems([*words, f"data.template={tmp_path}/mine.jinja"]) == ""
    (tmp_path / "mine.jinja").write_text("{% if %}")
    assert "is no chat template" in problems([*words, f"data.template={tmp_path}/mine.jinja"])


def test_a_template_that_changes_earlier_turns_is_told(tmp_path, words):
    changing = "{% for m in messages %}{{ m['role'] }}{% if loop.last %}!{% endif %}{{ m['content'] }}\n{% endfor %}"
    (tmp_path / "mine.jinja").write_text(changing)
    with pytest.raises(UserError, match="nothing to learn"):
        source([*words, f"data.template={tmp_path}/mine.jinja"])
