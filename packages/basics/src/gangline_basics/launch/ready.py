"""Imports of the modules of every part in the default distributions. Only the fork server imports this module."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

from gangline.plugin.registry import installed
from gangline_basics.launch.forkserver import find_default_suppliers, find_usual

_usual = find_default_suppliers()

for _group in installed().list_groups():
    for _offer in installed().get_offers(_group).values():
        if _offer.distribution in _usual:
            with suppress(ImportError):  # a rank that needs the module raises the error
                import_module(_offer.part.build.partition(":")[0])
for _module in find_usual():
    import_module(_module)

installed.cache_clear()  # each rank must check again which packages are installed
