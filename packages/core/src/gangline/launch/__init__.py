"""The launcher contract, and helpers of launchers: jobs, signals, logs, process guards, addresses. Torch-free."""
