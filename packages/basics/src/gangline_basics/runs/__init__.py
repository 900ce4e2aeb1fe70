"""`gangline runs` and `gangline compare`: what lies in a folder of runs, and how they differ."""
