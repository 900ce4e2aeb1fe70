"""Products in 8-bit floating point: a precision that any strategy can compute with."""
