"""Fault injection (`health=chaos`), to test that a run detects and survives faults."""
