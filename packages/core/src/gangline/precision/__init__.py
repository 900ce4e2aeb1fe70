"""Which numbers a run computes with: what a precision imports."""
