"""Errors of a rank that its launcher distinguishes. Torch-free."""

from __future__ import annotations

from gangline.errors import PeerFailed

# What gloo and NCCL say when the other end is gone. gloo raises plain RuntimeErrors.
_LOST_PEER = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")
_LOST_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")


class RestartWanted(Exception):
    """A verdict asks for new workers: the launcher starts them again, from the latest checkpoint.

    requeue: where it cannot, a scheduler is to do so.
    """

    def __init__(self, what: str, requeue: bool = False) -> None:
        self.requeue = requeue
        super().__init__(what)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, only says that another rank is gone or has failed."""
    cause: BaseException | None = error
    ids: set[int] = set()
    while cause is not None and id(cause) not in ids:  # an error may be its own cause
        ids.add(id(cause))
        if isinstance(cause, PeerFailed):
            return True
        names = [base.__name__ for base in type(cause).__mro__]
        if any(name in _LOST_PEER_TYPES for name in names):
            return True
        if isinstance(cause, RuntimeError) and any(words in str(cause) for words in _LOST_PEER):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
