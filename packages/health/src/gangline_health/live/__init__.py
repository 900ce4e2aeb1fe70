"""A run while it lives: its page, its alerts, its metrics. Nothing here imports torch or takes part in a step."""
