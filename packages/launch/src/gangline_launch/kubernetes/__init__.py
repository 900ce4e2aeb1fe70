"""Launcher `launch=kubernetes`: a JobSet in a queue of Kueue."""
