"""Listing and comparison of the runs in a folder: `gangline runs` and `gangline compare`."""
