"""Reading: which chunks are wanted, from the nearest tier that has them good, into memory."""
