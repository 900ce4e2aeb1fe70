"""A run's layout as numbers, as a page of text, and traced through its real operators."""
