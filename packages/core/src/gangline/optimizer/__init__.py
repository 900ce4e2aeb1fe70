"""How weights follow gradients."""

from gangline.optimizer.base import Optimizer

__all__ = ["Optimizer"]
