"""Listing, comparison and reports of runs: `gangline runs`, `gangline compare` and `gangline report`."""
