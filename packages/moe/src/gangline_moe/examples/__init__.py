"""Whole plugins that add to what this package opens to others; read as text by `gangline new-plugin`."""
