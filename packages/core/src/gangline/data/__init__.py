"""What a run reads."""

from gangline.data.base import DataSource, Sample, Split

__all__ = ["DataSource", "Sample", "Split"]
