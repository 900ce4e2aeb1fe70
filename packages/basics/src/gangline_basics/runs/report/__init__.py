"""`gangline report`: a run, or a comparison of runs, as one static HTML page."""
