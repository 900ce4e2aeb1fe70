"""Larger example plugins for `gangline new-plugin`; smaller examples are in the specifications of hooks.

`new-plugin` reads the examples as text and never imports them. The first line of an example contains its name.
"""
