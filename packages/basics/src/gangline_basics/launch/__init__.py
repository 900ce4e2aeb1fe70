"""Launchers: processes on this machine, and elastic agents on several nodes that rendezvous in the run directory."""
