"""One-line descriptions of errors, for the step report and for messages. Torch-free."""

from __future__ import annotations


def describe_error(error: BaseException) -> str:
    """Return what failed, in the words of the operating system, with the file name if there is one."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
