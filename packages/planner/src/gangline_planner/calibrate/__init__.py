"""`gangline plan calibrate`: this machine as a cluster file."""
