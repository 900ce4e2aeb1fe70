"""An error in one line, for the step report and for messages. Torch-free."""

from __future__ import annotations


def describe_error(error: BaseException) -> str:
    """What failed, in the words of the system, with the place."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
