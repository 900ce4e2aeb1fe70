"""Optimizers: AdamW, AdamW with 8-bit moments, Lion, Muon, SOAP."""
