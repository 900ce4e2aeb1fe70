"""`data=tokens data.order=text`: samples equal those of `data=text`."""

from __future__ import annotations

import numpy as np
import pytest

from gangline_basics.data import text
from gangline_dataloader.sources import build
from gangline_testkit.runs import build_small_run

SIZES = ("model.vocab_size=256", "batch.sequence_length=48", "validate.every=10")


@pytest.mark.parametrize("documents", ["true", "false"])
def test_token_store_samples_equal_text_data_samples(texts, make_store, documents):
    for name in ("binary.bin", "empty.txt"):
        (texts / name).unlink()
    asked = (*SIZES, f"data.document_masking={documents}")
    store = make_store(texts, clean=(), exact=False, validation=0.2)
    ours = build_small_run(*asked, "data=tokens", f"data.path={store}", "data.order=text")
    theirs = build_small_run(*asked, "data=text", f"data.path={texts}", "data.validation_fraction=0.2")
    for split in ("train", "validation"):
        mine, reference = build.build_tokens(ours.data, ours, split), text.build(theirs.data, theirs, split)
        count = reference.count_samples()
        assert mine.count_samples() == count > 3
        for i in range(2 * count + 5):
            one, other = mine.sample(i), reference.sample(i)
            assert one.keys() == other.keys()
            assert all(np.array_equal(one[name], other[name]) for name in one), (split, i)
