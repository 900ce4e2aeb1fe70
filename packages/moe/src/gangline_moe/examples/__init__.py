"""Example plugins that extend this package, read as text by `gangline new-plugin`."""
