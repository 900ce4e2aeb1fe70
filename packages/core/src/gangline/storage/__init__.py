"""Storage: functions to open, lock and replace files safely, and retries of transient failures."""
