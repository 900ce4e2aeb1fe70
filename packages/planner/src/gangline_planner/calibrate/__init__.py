"""Calibration (`gangline plan calibrate`): measures this machine and writes a cluster file."""
