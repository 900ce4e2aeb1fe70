"""Conformance suites of the testkit, run on `lora=on` and `data=chat`."""

from __future__ import annotations

import pytest
from chats import tokenizer, write

from gangline_testkit import DataSourceSuite, ModelEditSuite


class TestLora(ModelEditSuite):
    choice = "lora=on"
    settings = ("lora.rank=3",)


@pytest.mark.nightly
class TestDora(ModelEditSuite):
    """DoRA with row norms and dropout masks of matrices that tp shards."""

    choice = "lora=on"
    settings = ("lora.rank=3", "lora.dora=true", "lora.dropout=0.3", "lora.targets=[wq,wo,w_up,w_down]")
    layouts = (1, 2)


class TestChat(DataSourceSuite):
    choice = "data=chat"

    def write_corpus(self, directory, first=0, words=1500):
        path = tokenizer(directory / "model")
        rows = [
            {"messages": [{"role": "user", "content": str(n)}, {"role": "assistant", "content": f"{n + 1}"}]}
            for n in range(first, first + words // 10)
        ]
        return (f"data.path={write(directory / f'{first}-{words}.jsonl', rows)}", f"data.tokenizer={path}")
