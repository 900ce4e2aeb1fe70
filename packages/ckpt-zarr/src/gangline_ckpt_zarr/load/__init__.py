"""Loading: the wanted chunks, read into memory from the nearest tier that has a good copy."""
