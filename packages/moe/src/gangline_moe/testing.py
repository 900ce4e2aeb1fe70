"""Test suite for routers of other plugins (group `moe/router`). Needs `gangline-testkit`."""

from __future__ import annotations

from typing import ClassVar

import pytest

from gangline_testkit import FLOAT64, LAYOUT, LAYOUT_CLAIM, ModelEditSuite, PartSuite, mark_capability


class RouterSuite(PartSuite):
    """Test suite of a router in an MoE model, on several layouts. Subclass it with ``choice = "moe/router=mine"``."""

    worlds: ClassVar[tuple[int, ...]] = (2, 4)
    CLAIMS: ClassVar[dict[str, str]] = LAYOUT_CLAIM

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "world" in metafunc.fixturenames:
            metafunc.parametrize("world", self.worlds)

    def make_edit_suite(self) -> ModelEditSuite:
        """Make the test suite of the edit `moe` with this router."""
        suite = ModelEditSuite()
        (edit,) = self.around
        suite.choice, suite.settings = edit, (self.choice, *self.settings)
        return suite

    def test_loss_and_gradients_are_finite(self) -> None:
        self.make_edit_suite().test_loss_and_gradients_are_finite()

    def test_works_as_a_bare_module(self) -> None:
        self.make_edit_suite().test_works_as_a_bare_module()

    @mark_capability(LAYOUT)
    def test_layouts_agree(self, world: int) -> None:
        """Compare loss, gradients, gradient norm, metrics and weights with a run of one process, in float64."""
        suite = self.make_edit_suite()
        suite.compare(suite.make_job(world), FLOAT64)

    @mark_capability(LAYOUT)
    def test_recomputation_changes_nothing(self, world: int) -> None:
        suite = self.make_edit_suite()
        suite.compare(suite.make_job(world, recompute=True), FLOAT64)
