"""What acts while a run lives, on every rank."""

from gangline.callback.base import Callback, Metrics, like_parameters, start_from_weights

__all__ = ["Callback", "Metrics", "like_parameters", "start_from_weights"]
