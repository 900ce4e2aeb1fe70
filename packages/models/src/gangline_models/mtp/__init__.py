"""Model edit `mtp`: multi-token prediction (MTP)."""
