"""Which numbers a run computes with."""

from gangline.precision.base import Precision

__all__ = ["Precision"]
