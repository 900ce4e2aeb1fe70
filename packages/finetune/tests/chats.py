"""A small tokenizer with a chat template, and chats, generated for the tests."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tokenizer(directory: Path, template: str | None = TEMPLATE, bos: bool = False) -> Path:
    """Write a byte tokenizer with three special tokens and return the path of its tokenizer.json.

    bos: the second special token is added before each text
    """
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: 256 - len(SPECIAL)]
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    if bos:
        word = SPECIAL[1]
        pair = (word, made.token_to_id(word))
        made.post_processor = processors.TemplateProcessing(single=f"{word} $A", special_tokens=[pair])
    made.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    if bos:
        config["bos_token"] = SPECIAL[1]
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory / "tokenizer.json"


def chat(number: int, turns: int = 1) -> list[dict[str, str]]:
    """Return a chat whose answers follow from its questions."""
    found = [{"role": "system", "content": "Add."}] if number % 3 == 0 else []
    for turn in range(turns):
        a, b = number % 7, (number + turn) % 5
        found += [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": f"It is {a + b}."}]
    return found


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chats(path: Path, count: int = 40) -> Path:
    """Write chats of one to three turns as JSON lines and return their path."""
    return write(path, [{"messages": chat(number, 1 + number % 3)} for number in range(count)])
