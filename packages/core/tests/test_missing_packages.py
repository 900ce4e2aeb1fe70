"""The message about a run whose parts come from packages that are not installed."""

from __future__ import annotations

import pytest

from gangline.config.preflight import read_request
from gangline.errors import UserError
from gangline.plugin.registry import Installed


def test_message_installs_exactly_the_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {("parallel", "rings"): "one", ("checkpoint", "vault"): "two", ("data", "shelf"): "one"}

    def explain(self: Installed, group: str, name: str) -> list[str]:
        return [f"{group}={name} is supplied by {absent[group, name]}:  pip install -e /src/{absent[group, name]}"]

    def find(self: Installed, group: str, name: str) -> object:
        if (group, name) in absent:
            raise UserError(f"{group}={name} is not available here.", *explain(self, group, name))
        return own(self, group, name)

    own = Installed.find
    monkeypatch.setattr(Installed, "find", find)
    with pytest.raises(UserError) as error:
        read_request(["parallel=rings", "checkpoint=vault", "data=shelf"])
    assert "4. 2 packages are missing." in str(error.value)
    assert "To install all of them:  pip install -e /src/one -e /src/two\n" in f"{error.value}\n"
    with pytest.raises(UserError) as error:
        read_request(["parallel=rings", "data=shelf"])
    assert "To install" not in str(error.value)
