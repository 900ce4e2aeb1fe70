"""Base class of every conformance suite, with tests that a part is found, chosen, stored and listed without torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gangline.config.schema import PartConfig, Run
from gangline.config.serial import from_dict, to_dict
from gangline.errors import UserError
from gangline.plugin.discovery import Offer
from gangline.plugin.hooks import ENTRY_POINTS, LISTS
from gangline.plugin.registry import installed, load
from gangline_testkit.claims import find_overridden, find_standard_tests
from gangline_testkit.runs import build_small_run

GUARD = "test_no_standard_test_is_overridden_or_deleted"
IMPORT_SECONDS = 0.5  # maximum CPU seconds to import an entry module, without the import of gangline
LONGEST_SUMMARY = 120  # maximum characters of `Part.summary`

_IMPORT = """
import json, os, sys, time
import gangline.plugin.registry
began, before = time.process_time(), set(sys.modules)
out, sys.stdout = sys.stdout, open(sys.argv[2], "w")
sys.stderr, err = sys.stdout, sys.stderr
__import__(sys.argv[1])
sys.stdout.close()
heavy = sorted({"torch", "hydra", "transformers"} & set(sys.modules))
out.write(json.dumps({"seconds": time.process_time() - began, "heavy": heavy}))
"""


class PartSuite:
    """Conformance suite for any part. The suites of groups derive from this class; an author's class sets `choice`.

    choice    "group=name", as a user types it
    settings  further settings of the runs in the tests: ("checkpoint.level=3",)
    can       claims of the part: keys of the suite's `CLAIMS`
    """

    choice: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ()
    can: ClassVar[set[str]] = set()
    CLAIMS: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if GUARD in vars(cls) and not cls.__module__.startswith("gangline_testkit."):
            raise TypeError(f"{cls.__name__} must not override {GUARD}, which checks that no other test is overridden")

    # --- the part ----------------------------------------------------------------------------------------------------

    @property
    def group(self) -> str:
        return self.choice.partition("=")[0]

    @property
    def offer(self) -> Offer:
        """The part and its supplier. Raises UserError if the part is not installed."""
        return installed().find(self.group, self.choice.partition("=")[2])

    @property
    def build(self) -> Any:
        """The part's build function, imported."""
        return load(self.offer.part.build)

    def run(self, *settings: str) -> Run:
        """Return a small run with the part, the settings of the suite, and then these settings."""
        return build_small_run(*self.get_model_settings(), *self.around, *self.chosen, *self.settings, *settings)

    @property
    def chosen(self) -> tuple[str, ...]:
        """Settings that choose the part and the parts that it needs (`Part.needs`)."""
        lists: dict[str, list[str]] = {}
        single = []
        for word in (*self.offer.part.needs, self.choice):
            group, _, name = word.partition("=")
            if group in LISTS:
                lists.setdefault(group, []).append(name)
            else:
                single.append(word)
        return (*(f"{group}=[{','.join(names)}]" for group, names in lists.items()), *single)

    def keep_chosen(self, *settings: str) -> tuple[str, ...]:
        """Return these settings without the settings of groups that the suite or the part has already chosen."""
        theirs = {word.partition("=")[0] for word in (*self.chosen, *self.settings)}
        return tuple(word for word in settings if word.partition("=")[0] not in theirs)

    @property
    def around(self) -> tuple[str, ...]:
        """Choice of a part that opens the group of the tested part; empty for a group that always exists."""
        outer, nested, field = self.group.rpartition("/")
        if not nested:
            return ()
        openers = [name for name, offer in sorted(installed().get_offers(outer).items()) if field in offer.part.opens]
        return (f"{outer}={'on' if 'on' in openers else openers[0]}",)

    def get_model_settings(self) -> tuple[str, ...]:
        """Return settings that precede those of the part; the suite of a group may override this method."""
        return ()

    def build_config(self, run: Run) -> PartConfig:
        """Return the part's configuration in a run."""
        if self.group in LISTS:
            return getattr(run, self.group)[self.offer.part.name]
        outer, *fields = self.group.split("/")
        config = dict(run.iterate_parts())[outer]
        for field in fields:
            config = getattr(config, field)
        return config

    # --- packaging ---------------------------------------------------------------------------------------------------

    def test_no_standard_test_is_overridden_or_deleted(self) -> None:
        """Check that no standard test is replaced or deleted, except with `waive("why")`."""
        overrides = find_overridden(type(self))
        assert not overrides, (
            f"standard tests are overridden or deleted: {', '.join(overrides)}; use waive('why') instead"
        )

    def test_every_claim_is_known_to_the_suite(self) -> None:
        unknown = sorted(set(self.can) - set(self.CLAIMS))
        assert not unknown, (
            f"unknown claims in `can`: {', '.join(unknown)}; claims of this suite: {', '.join(self.CLAIMS)}"
        )
        capabilities = {getattr(test, "capability", None) for test in find_standard_tests(type(self)).values()} - {None}
        assert capabilities <= set(self.CLAIMS)

    def test_entry_module_imports_without_torch(self) -> None:
        """Check that the entry module, which `train --help` imports, loads no torch, Hydra or transformers."""
        heavy = self.import_entry_module()["heavy"]
        assert not heavy, f"{find_entry_module(self.offer.distribution)} must not import {', '.join(heavy)}"

    def test_entry_module_imports_quickly(self) -> None:
        seconds = self.import_entry_module()["seconds"]
        if seconds >= IMPORT_SECONDS:  # retry: the machine was busy, or modules had to be compiled
            of = find_entry_module(self.offer.distribution), os.environ.get("PYTHONPATH", "")
            seconds = min(seconds, _import_module.__wrapped__(*of)["seconds"])
        assert seconds < IMPORT_SECONDS, (
            f"importing the entry module takes {seconds:.2f} s of CPU, more than {IMPORT_SECONDS} s"
        )

    def test_entry_module_prints_nothing(self) -> None:
        printed = self.import_entry_module()["printed"]
        assert not printed, f"importing the entry module prints {printed!r}"

    def import_entry_module(self) -> dict[str, Any]:
        """Import the entry module in a new process, and return the CPU seconds, heavy modules and printed text."""
        return _import_module(find_entry_module(self.offer.distribution), os.environ.get("PYTHONPATH", ""))

    def test_summary_is_one_short_line(self) -> None:
        summary = self.offer.part.summary
        assert summary.strip() == summary
        assert len(summary) <= LONGEST_SUMMARY, (
            f"the summary has {len(summary)} characters, more than {LONGEST_SUMMARY}"
        )

    def test_build_path_resolves(self) -> None:
        assert callable(self.build), f"build={self.offer.part.build} is not a function"

    def test_config_survives_storage(self) -> None:
        """Check that the configuration is equal after storage as plain data, as in config.yaml and checkpoints."""
        run = self.run()
        run_dict = json.loads(json.dumps(to_dict(run)))
        assert self.build_config(from_dict(run_dict)) == self.build_config(run)
        assert to_dict(from_dict(run_dict)) == run_dict

    def test_config_refuses_an_unknown_option(self) -> None:
        with pytest.raises(UserError, match="no_such_option"):
            self.run(f"{self.path}.no_such_option=1")

    @property
    def path(self) -> str:
        """Prefix of the part's options: "checkpoint", "track.jsonl"."""
        return f"{self.group}.{self.offer.part.name}" if self.group in LISTS else self.group.replace("/", ".")

    def test_part_is_chosen_by_name_on_the_command_line(self) -> None:
        from gangline.config.compose import compose

        group, _, name = self.choice.partition("=")
        word = f"{group}=[{name}]" if group in LISTS else self.choice
        (run,) = compose([*self.around, word, *self.settings])
        assert type(self.build_config(run)) is self.offer.part.config

    def test_environment_variables_are_valid_and_repeatable(self) -> None:
        """Check that `get_environment` returns valid variables, equal on each call, and sets none: core sets them."""
        run, before = self.run(), dict(os.environ)
        config = self.build_config(run)
        variables = config.get_environment(run)
        assert variables == config.get_environment(run), "`get_environment` returns other variables on the second call"
        assert dict(os.environ) == before, "`get_environment` sets variables in os.environ; it must only return them"
        for name, value in variables.items():
            assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name), (
                f"{name!r} is not a valid name of an environment variable"
            )
            assert isinstance(value, str), f"the value of {name} must be a str, and is {value!r}"

    def test_wrapped_comm_returns_the_results_of_the_bare_comm(self) -> None:
        """Check on two ranks that every operation of a wrapped Comm gives the results of the bare Comm."""
        run = self.run()
        config = self.build_config(run)
        if type(config).wrap is not PartConfig.wrap:
            from gangline_testkit.comm_ranks import check_traffic
            from gangline_testkit.pool import get_pool

            get_pool(2).run(check_traffic, config, run)


def check_success(done: subprocess.CompletedProcess[str]) -> None:
    """Check that a process exited with 0. Raises AssertionError that begins with the last line of its stderr."""
    if done.returncode:
        raise AssertionError(f"{done.stderr.strip().rpartition(chr(10))[2]}\n{done.stderr}")


def find_entry_module(distribution: str) -> str:
    """Return the module that a distribution registers with gangline. Raises LookupError if it registers none."""
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.dist is not None and entry.dist.metadata["Name"] == distribution:
            return entry.module
    raise LookupError(f"the distribution {distribution} registers no entry point in the group {ENTRY_POINTS}")


@cache
def _import_module(module: str, pythonpath: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        printed = Path(directory, "printed")
        process = subprocess.run(
            [sys.executable, "-c", _IMPORT, module, str(printed)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": pythonpath},
        )
        check_success(process)
        return {**json.loads(process.stdout), "printed": printed.read_text() + process.stderr}
