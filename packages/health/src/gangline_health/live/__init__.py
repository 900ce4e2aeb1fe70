"""Live status of a run: terminal report, alerts, metrics. Torch-free; runs outside of the ranks."""
