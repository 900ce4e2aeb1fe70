"""Loads the modules of the parts that runs have by default, and of those beside them. For the fork server alone."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

from gangline.config.defaults import DEFAULTS
from gangline.plugin.registry import installed

_every = [offer for group in installed().groups() for offer in installed().offers(group).values()]
_usual = {offer.distribution for offer in _every if offer.part.name in (DEFAULTS.get(offer.group) or ())}

for _offer in _every:
    if _offer.distribution in _usual:
        with suppress(ImportError):  # a rank that needs it says so
            import_module(_offer.part.build.partition(":")[0])

installed.cache_clear()  # a rank looks for itself what is installed
