"""The model edit `mup`: the rates that are best for a narrow model are best for a wide one."""
