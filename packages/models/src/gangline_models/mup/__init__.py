"""Model edit `mup`: learning rates tuned on a narrow model are optimal for a wide one."""
