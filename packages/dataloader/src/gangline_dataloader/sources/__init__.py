"""What a run reads: samples of one token store, or of a mixture of them, as core's data sources."""
