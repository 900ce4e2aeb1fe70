"""Live status of a run: terminal report, alerts, metrics. It imports no torch, and takes no part in a step."""
