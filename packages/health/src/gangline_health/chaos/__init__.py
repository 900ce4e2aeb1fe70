"""health=chaos: faults put into a run, to see that they are found and survived."""
