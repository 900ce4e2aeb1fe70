"""Language identification of documents by py3langid, whose model is part of the package: no file is downloaded.

py3langid is a naive Bayes classifier over byte n-grams (Lui and Baldwin, "langid.py", ACL 2012).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from gangline import UserError
from gangline_dataloader.prepare.rule import Dropped

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

READ = 4096  # leading characters that are classified: more would change few results and cost time


@cache
def _load_identifier() -> LanguageIdentifier:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise UserError("--language needs py3langid.", "", "pip install 'gangline-dataloader[language]'") from error
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def check(languages: Sequence[str]) -> None:
    """Raise UserError for a language code that the model does not know, or if py3langid is not installed."""
    codes = sorted(_load_identifier().labels)
    if unknown := [code for code in languages if code not in codes]:
        raise UserError(
            f"--language {','.join(languages)}: unknown language {unknown[0]}.", f"ISO 639 codes: {', '.join(codes)}."
        )


def check_language(text: str, languages: Sequence[str], confidence: float) -> Dropped | None:
    """Return None if the text is in one of `languages` with at least `confidence` in [0, 1], else why it is dropped.

    For a text of few words the confidence is low: the reason is then "unsure", without a language.
    """
    code, sure = _load_identifier().classify(text[:READ])
    if sure < confidence:
        return Dropped("language: unsure")
    return None if code in languages else Dropped(f"language: {code}")
