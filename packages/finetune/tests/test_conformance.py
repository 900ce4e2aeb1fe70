"""The conformance suite of the kit: adapters are trained alike under any layout."""

from __future__ import annotations

from gangline.testing import ModelEditSuite


class TestLora(ModelEditSuite):
    choice = "lora=on"
    settings = ("lora.rank=3",)
    can = {"law"}


class TestDora(ModelEditSuite):
    """Lengths of rows that tp has cut, and draws of features that it has cut."""

    choice = "lora=on"
    settings = ("lora.rank=3", "lora.dora=true", "lora.dropout=0.3", "lora.targets=[wq,wo,w_up,w_down]")
    can = {"law"}
    layouts = (1, 2)
