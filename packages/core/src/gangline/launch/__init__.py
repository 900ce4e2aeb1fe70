"""From a run directory to running processes: what a launcher imports. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.plugin.lazy import lazily

if TYPE_CHECKING:
    from gangline.config.answers import Sidecar as Sidecar
    from gangline.launch.base import Launcher as Launcher
    from gangline.launch.config import ElasticLaunch as ElasticLaunch, LocalLaunch as LocalLaunch
    from gangline.launch.exclusion import excluded as excluded
    from gangline.launch.failures import RankFailure as RankFailure, claim as claim
    from gangline.launch.forked import fork_agent as fork_agent
    from gangline.launch.guard import born as born, die_with as die_with, space as space
    from gangline.launch.local import LocalLauncher as LocalLauncher
    from gangline.launch.nodes import fewest_and_most as fewest_and_most, name_of_this_node as name_of_this_node
    from gangline.launch.output import log_path as log_path
    from gangline.launch.several import run_node as run_node
    from gangline.launch.signals import (
        ANSWER as ANSWER,
        STACKS as STACKS,
        answer_signal as answer_signal,
        default_requests as default_requests,
    )

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.config.answers": "Sidecar",
        "gangline.launch.base": "Launcher",
        "gangline.launch.config": "ElasticLaunch LocalLaunch",
        "gangline.launch.exclusion": "excluded",
        "gangline.launch.failures": "RankFailure claim",
        "gangline.launch.forked": "fork_agent",
        "gangline.launch.guard": "born die_with space",
        "gangline.launch.local": "LocalLauncher",
        "gangline.launch.nodes": "fewest_and_most name_of_this_node",
        "gangline.launch.output": "log_path",
        "gangline.launch.several": "run_node",
        "gangline.launch.signals": "ANSWER STACKS answer_signal default_requests",
    },
)
