"""Calibration (`gangline plan calibrate`): measures this machine for a cluster file."""
