"""`--replace`: email addresses and phone numbers become placeholders, counted; similar text is unchanged."""

from __future__ import annotations

import time

import pytest

from gangline.errors import UserError
from gangline_dataloader import commands
from gangline_dataloader.prepare.private import KINDS, replace_private
from gangline_dataloader.store.manifest import read

FOUND = {
    "email": ["a@b.org", "first.last+tag@mail.example.co.uk", "jürgen@beispiel.de"],
    "ip": ["192.168.0.1", "8.8.8.8", "2001:db8::1", "fe80::1:2:3", "::1"],
    "phone": ["+49 170 1234567", "+1 (555) 123-4567", "(030) 1234 5678", "+442071234567", "+1-555-123-4567"],
}
LEFT = {
    "email": ["@name", "a@b", "x @ y.z", "user@", "git@host:path"],
    "ip": ["256.1.1.1", "1.2.3", "1.2.3.4.5", "std::vector", "12:30:45", "a::b::c", "::"],
    "phone": ["1234567", "2026-11-22", "(1999) 12", "+1 2", "f(12)34567x", "3.14159265", "x+12345678"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_private_data_is_replaced_and_similar_text_kept(kind):
    word = KINDS[kind][2]
    for text in FOUND[kind]:
        for around in ("{}", "see {}.", "<{}>, and", "{}\n{}"):
            given = around.replace("{}", text)
            assert replace_private(given, [kind]) == (around.replace("{}", word), {kind: around.count("{}")}), given
    for text in LEFT[kind]:
        given = f"see {text} here"
        assert replace_private(given, [kind]) == (given, {}), given
    assert replace_private("".join(FOUND[kind]), []) == ("".join(FOUND[kind]), {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("piece", ["a.", "a@", "1.", "1:", "+1 ", "(12) ", "11 ", ":", "a-@a-."])
def test_replacement_time_grows_linearly(kind, piece):
    """Replace in 200 kB of near matches within 2 s of CPU time, which quadratic growth would exceed."""
    start = time.process_time()
    replace_private(piece * (200_000 // len(piece)), [kind])
    assert time.process_time() - start < 2


def test_prepare_replaces_private_data_and_counts_replacements(tmp_path, make_store):
    (tmp_path / "a.txt").write_text("Write to me@here.org or call +49 170 1234567 from 10.0.0.1 or me@there.org.")
    store = make_store(tmp_path / "a.txt", private=tuple(KINDS), validation=0)
    assert read(store).report["by_source"][str(tmp_path / "a.txt")]["replaced"] == {"email": 2, "ip": 1, "phone": 1}
    text = (store / "shard-00000.npy").read_bytes()[128:-1].decode()
    assert text == "Write to EMAIL_ADDRESS or call PHONE_NUMBER from IP_ADDRESS or EMAIL_ADDRESS."
    with pytest.raises(UserError, match="unknown kind name"):
        commands.main(["prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--replace", "email,name"])
