"""Secrets: options that hold one are refused, and those on a command line are hidden."""

from __future__ import annotations

import pytest

from gangline.errors import UserError
from gangline.run.redaction import looks_secret, redact, refuse_secrets

RANDOM = "a1B2c3D4e5F6g7H8i9J0"  # looks like an API key


def test_secrets_on_the_command_line_are_hidden():
    words = [
        "track.x.api_key=abc",
        "data.path=s3://me:hunter2@bucket/x",
        "data.tokenizer=t.json",
        "x.token=${oc.env:T}",
    ]
    assert [redact(word) for word in words] == [
        "track.x.api_key=***",
        "data.path=s3://me:***@bucket/x",
        "data.tokenizer=t.json",
        "x.token=${oc.env:T}",
    ]


@pytest.mark.parametrize(
    "key",
    [
        "api_key",
        "track.wandb.api-key",
        "auth_token",
        "password",
        "x.pwd",
        "bearer",
        "passphrase",
        "apitoken",
        "s3.secret_key",
        "TOKEN",
    ],
)
def test_secret_key_names_are_detected(key):
    assert looks_secret(key)


@pytest.mark.parametrize("key", ["data.tokenizer", "tokens", "key", "run.seed", "keys", "max_tokens", "secretary"])
def test_plain_key_names_are_not_secret(key):
    assert not looks_secret(key)


@pytest.mark.parametrize(
    "content",
    [{"track": {"x": {"api_key": "abc"}}}, {"data": {"path": ["a", "s3://me:hunter2@bucket/x"]}}, {"token": "t"}],
)
def test_content_with_secret_is_refused(content):
    with pytest.raises(UserError, match="contains a secret"):
        refuse_secrets(content)


def test_content_without_secret_is_accepted():
    refuse_secrets({"token": "${oc.env:T}", "data": {"path": "s3://bucket/x"}, "api_key": None, "n": 3})


TEXTS = [
    "export WANDB_API_KEY=abc",
    'HF_TOKEN="abc" other',
    "curl -u me:hunter2 https://host",
    "curl --user=me:hunter2 https://host",
    f"curl -H 'Authorization: Bearer {RANDOM}' https://host",
    "notify --token abc",
    "notify --api-key=abc",
    f"https://{RANDOM}@host/x",
    "sqlite:///ml.db?apitoken=abc",
    "https://host/x?a=b&sig=abc",
    f"hf_{RANDOM}",
    "AKIAABCDEFGHIJKLMNOP",
    f"ghp_{RANDOM}",
    f"sk-{RANDOM}",
    "s3://me:hunter2@bucket",
    "s3://me:hunter2${oc.env:X}@bucket",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_with_secret_is_refused_and_hidden(text):
    contents = [{"x": text}, {"x": [text]}, {"x": [["a", text]]}, {"x": [{"y": text}]}, {"x": {"y": [{"z": [text]}]}}]
    for content in contents:
        with pytest.raises(UserError, match="contains a secret") as caught:
            refuse_secrets(content)
        assert text not in str(caught.value)
    hidden = redact(f"x={text}")
    assert "***" in hidden
    for secret in ("hunter2", RANDOM, "abc", "AKIA"):
        assert secret not in hidden


@pytest.mark.parametrize("key", ["wandb_key", "x.auth", "auth"])
def test_value_decides_if_ambiguous_key_is_secret(key):
    with pytest.raises(UserError, match="contains a secret"):
        refuse_secrets({key: RANDOM})
    assert redact(f"{key}={RANDOM}") == f"{key}=***"
    refuse_secrets({key: "name", "sort_key": "loss", "primary-key": "document/number"})


@pytest.mark.parametrize("value", ["${oc.env:X}sk-real", "sk-real${oc.env:X}", "${oc.env:X,sk-real}"])
def test_reference_next_to_secret_is_refused(value):
    with pytest.raises(UserError, match="contains a secret"):
        refuse_secrets({"password": value})
    assert redact(f"x.password={value}") == "x.password=***"


@pytest.mark.parametrize(
    "text",
    [
        "export TOKENIZERS_PARALLELISM=false",
        "export SSL_KEY=/etc/key.pem API_KEY=$OTHER TOKEN=$(cat file) HF_TOKEN=~/token",
        "curl -u me:${oc.env:PASSWORD} https://host",
        "curl -H 'Authorization: Bearer ${oc.env:TOKEN}' https://host/a/long/path/1",
        "https://me:${oc.env:PASSWORD}@host",
        "https://host/x?monkey=1&page=2",
        "ssh://git@github.com/x",
        "runs/my-sk-learn-experiment-of-2024",
        "The bearer of this letter",
        "docker run -u 1000:$GID x",
        "docker run -u 1000:1000 x",
    ],
)
def test_text_without_secret_is_accepted(text):
    refuse_secrets({"x": text, "y": [text]})
    assert redact(f"x={text}") == f"x={text}"


@pytest.mark.parametrize(
    ("word", "hidden"),
    [
        ("'x.password'=abc", "'x.password'=***"),
        ('"x.password"=abc', '"x.password"=***'),
        ("x={password: abc, name: b}", "x={password: ***, name: b}"),
        ("x={db_password: 'abc'}", "x={db_password: '***'}"),
        ("++x.token=abc", "++x.token=***"),
        ("launch.setup=['export WANDB_API_KEY=abc']", "launch.setup=['export WANDB_API_KEY=***']"),
    ],
)
def test_redact_hides_only_the_secret(word, hidden):
    assert redact(word) == hidden
