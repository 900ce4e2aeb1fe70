"""What plugins are to core: the hooks they implement, the parts they offer, and how those are found.

Torch-free. `hooks` is the table of contents, `parts` has `Part`, `registry` answers what is installed.
"""
