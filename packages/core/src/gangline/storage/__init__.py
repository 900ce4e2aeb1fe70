"""Storage: files that are opened, locked and replaced safely, and retries of failures that may pass."""
