"""Errors of a rank that its launcher distinguishes. Torch-free."""

from __future__ import annotations

from gangline.errors import PeerFailed

# Error messages of gloo and NCCL when a peer is gone. gloo raises plain RuntimeErrors.
_LOST_PEER = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")
_LOST_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")


class RestartWanted(Exception):
    """Error by which a verdict requests a restart: the launcher starts new ranks from the latest checkpoint.

    requeue: whether a scheduler should restart the job if the launcher cannot.
    """

    def __init__(self, what: str, requeue: bool = False) -> None:
        self.requeue = requeue
        super().__init__(what)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error, or an error that caused it, only reports that another rank is gone or failed."""
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
