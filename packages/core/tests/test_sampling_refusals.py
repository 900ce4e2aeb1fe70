"""Sampling errors: non-finite probabilities, invalid temperature, missing device.

Invalid probabilities never yield the last token of the vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gangline.cli.main import main
from gangline.errors import UserError
from gangline.runtime import Sampling
from gangline_basics.sampling.draw import draw
from gangline_testkit.sessions import train_session


@pytest.mark.parametrize(("logits", "temperature"), [([5.0, 1.0, 0.0], 1e-320), ([torch.inf, 1.0, 0.0], 1.0)])
def test_nonfinite_probabilities_are_refused(logits: list[float], temperature: float) -> None:
    with pytest.raises(UserError, match="probabilities"):
        draw(torch.tensor([logits]), Sampling(tokens=1, temperature=temperature), torch.tensor([0]), 0)


@pytest.mark.parametrize("temperature", [float("inf"), float("nan"), -1.0])
def test_invalid_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Sampling(tokens=1, temperature=temperature)
    with pytest.raises(SystemExit) as ended:
        main(["sample", "run", "--temperature", str(temperature)])
    assert ended.value.code == 2


def test_missing_device_is_refused(tmp_path: Path, capsys) -> None:
    assert train_session(tmp_path / "run", "run.steps=2") == 0
    for device in ("gpu", "cuda:99", "meta", "cpu:1"):
        assert main(["sample", str(tmp_path / "run"), "--device", device]) == 2
        assert f"device {device} is not available" in capsys.readouterr().err
