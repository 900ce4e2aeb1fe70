"""Whole plugins, one for each kind that the hooks' own docstrings do not show: what `gangline new-plugin` starts from.

They are read as text and never imported from here. The first line of each says the name it goes by.
"""
