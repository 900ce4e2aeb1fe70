"""From the command line to typed dataclasses."""

from gangline.config.schema import Run
from gangline.config.sections import BatchSection, Recompute, RunSection, ValidateSection

__all__ = ["BatchSection", "Recompute", "Run", "RunSection", "ValidateSection", "default_run"]


def __getattr__(name: str):
    # Lazy: `default_run` asks what is installed, and the modules of plugins import this package.
    if name == "default_run":
        from gangline.config.defaults import default_run

        return default_run
    raise AttributeError(name)
