"""Launchers: processes on this machine, and agents on several nodes that meet in the run directory."""
