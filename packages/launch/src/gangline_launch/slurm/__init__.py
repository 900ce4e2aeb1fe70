"""`launch=slurm`."""
