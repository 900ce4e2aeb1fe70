"""Fault injection (`health=chaos`), to see that a run detects and survives faults."""
