"""Launcher `launch=slurm`: an array or batch job of Slurm."""
