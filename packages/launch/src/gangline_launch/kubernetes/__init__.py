"""`launch=kubernetes`."""
