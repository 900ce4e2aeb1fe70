"""One-line descriptions of errors, for the step report and for messages. Torch-free."""

from __future__ import annotations


def describe_error(error: BaseException) -> str:
    """Return one line about an error; for an OSError, the operating system's message and the file name if known."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
