"""Burn-in: measures all ranks before the first step, and reports bad ranks."""
