"""The model edit `mtp`: further tokens are predicted beside the next one."""
