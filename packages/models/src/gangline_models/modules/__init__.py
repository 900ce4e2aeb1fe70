"""What core's decoder lacks, a page each: single-device code that knows nothing of ranks."""
