"""Example plugins that `gangline new-plugin` starts from; smaller ones are in the specifications of hooks.

They are read as text and never imported from here. The first line of each says the name it goes by.
"""
