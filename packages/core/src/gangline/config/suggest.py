"""Suggestions ("Did you mean ...?") for unknown words, by spelling and by names in other frameworks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping

from gangline.plugin import catalogue

_ANSWER = {word: answer for words, answer in catalogue.WORDS.items() for word in words.split()}
_OURS = {theirs: ours for ours, words in catalogue.SYNONYMS.items() for theirs in words.split()}


def suggest_near(word: str, known: Iterable[str], cutoff: float = 0.67) -> str:
    """Return "Did you mean X?" with the entry of `known` that is closest to `word`; "" if none is close."""
    close = difflib.get_close_matches(word, list(known), 1, cutoff)
    return f"Did you mean {close[0]}?" if close else ""


# Product that other frameworks support by an option -> its group of parts.
_GROUP = dict.fromkeys(["wandb", "mlflow", "comet", "neptune", "aim", "clearml"], "track")
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_FALSE = ("false", "off", "0", "0.0", "no", "none", "null", "disabled")
_USUAL = {"gradients": "fp32"}  # group -> number format of its default part, which a peer names by the format


def answer(word: str, value: str, words: Mapping[str, str]) -> str:
    """Return what to type in place of a word of another framework; "" for an unknown word.

    value: the user's value for the word. words: words of installed parts (`Installed.get_words`).
    """
    name = _get_name(word)
    template = _ANSWER.get(name) or next((advice for theirs, advice in words.items() if name in theirs.split()), "")
    template = template or _find_peer_answer(word.lower().replace("-", "_"))
    if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", template):
        return f"Did you mean {template}?"
    return _fit(template, value.lower().strip("'\"[]")) if template else ""


def _find_peer_answer(path: str) -> str:
    """Return the migration tables' answer for a path or for a last name of several words; GROUP.name: GROUP=NAME."""
    if path in catalogue.PEERS:
        return catalogue.PEERS[path]
    group, _, name = path.rpartition(".")
    if name in ("name", "type") and catalogue.list_names(group):
        return f"{group}=NAME"
    answers = {ours for theirs, ours in catalogue.PEERS.items() if theirs.endswith(f".{name}") and "_" in name}
    return answers.pop() if len(answers) == 1 else ""


def _fit(template: str, value: str) -> str:
    """Return an answer of the catalogue for a value, which may switch off, or name another part of the same group."""
    value = _DTYPES.get(value, value)
    usual = value == _USUAL.get(template.partition("=")[0])
    off = (usual or value in _FALSE) and not re.search("[A-Z]", template)  # a placeholder in a template needs a value
    template = template.replace("{n}", value if value.isdecimal() and not off else "N")
    if match := re.fullmatch(r"((\w+)=\[?)((?:\w+,)*)(\w+)(\]?)", template):
        start, group, others, part, end = match.groups()
        choice = "off" if part == "NAME" and value in _FALSE else value
        if choice in (names := catalogue.list_names(group)):
            return f"Type  {start}{others}{choice}{end}"
        if off and others and part in catalogue.list_defaults(group):
            return f"Type  {start}{others[:-1]}{end}  ({part} is on by default)"
        if names and not off and (part == "NAME" or value in _DTYPES.values() or value in _GROUP):
            return f"Type  {start}{others}NAME{end}  ({', '.join(names)})"
    line = f"Leave it out: it is off by default  (to turn it on: {template})" if off else template
    return line if line.startswith("Leave") else f"Type  {line}"


def explain_external(word: str, choices: Collection[str]) -> list[str]:
    """Return lines for a word that names a product for which a group has no part; [] for any other word."""
    name = word.rpartition(".")[2].lower()
    if (group := _GROUP.get(name)) is None or name in choices:
        return []
    return [
        f"{name} is not supported here. Choices: {group}=[{','.join(choices)}].",
        f"To write a part for {name}:  gangline new-plugin {name} --kind tracker",
    ]


def find_options(word: str, known: Collection[str], synonyms: Mapping[str, str]) -> list[str]:
    """Return options in `known` with the last name of `word`, else options that have the name as a synonym."""
    name = word.replace("-", "_")
    own = [path for path in known if path == name or path.rpartition(".")[2] == name.rpartition(".")[2]]
    return own or _find_synonyms(name, known, synonyms)


def suggest_synonym(path: str, known: Collection[str], synonyms: Mapping[str, str]) -> str:
    """Return "Did you mean X?" with the options in `known` that have the last name of `path` as a synonym; else ""."""
    ours = _find_synonyms(path, known, synonyms)
    return f"Did you mean {' or '.join(ours)}?" if ours else ""


def _find_synonyms(word: str, known: Collection[str], synonyms: Mapping[str, str]) -> list[str]:
    name = _get_name(word)
    ours = [_OURS.get(name, ""), *(path for path, theirs in synonyms.items() if name in theirs.split())]
    paths = [path for path in dict.fromkeys(ours) if path in known]
    section = word.rpartition(".")[0]  # an option of the section that the user named goes first
    return [path for path in paths if section and path.rpartition(".")[0] == section] or paths


def _get_name(path: str) -> str:
    """Return the last name of a dotted path in lower case, with underscores instead of dashes."""
    return path.rpartition(".")[2].lower().replace("-", "_")
