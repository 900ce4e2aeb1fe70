"""The descriptor with which a plugin offers a part of a run: `Part`. Torch-free.

A part describes what exists; the user's configuration chooses parts and sets their values. `build` names the code,
which is imported only when the part is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_NEED = re.compile(r"[a-z][a-z0-9_]*=[a-z0-9][a-z0-9_.-]*")
_BUILD = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One choice in one group.

    Each part has its own config class (subclass one to offer other defaults), so that a config object identifies its
    part. Raises ValueError or TypeError if a field is not as its comment requires.
    """

    name: str  # name that the user types after "="
    config: type  # dataclass of the options, with their defaults
    build: str  # build function "package.module:name", imported only when the part is chosen
    summary: str  # one-line description in `gangline plugins`
    group: str | None = None  # group of the part, if the hook sets none (gangline_model_edits, gangline_parts)
    opens: Mapping[str, str] = field(default_factory=dict)  # nested groups: field of the config -> default choice
    # field in `opens` -> existing group whose parts are its choices
    views: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # parts that a run with this part must have: "group=name"
    reads: tuple[str, ...] = ()  # plugins' groups whose chosen part this part builds (`run.extra[group]`)
    capabilities: Mapping[str, str] = field(default_factory=dict)  # name of a capability -> "module:name"
    # words of other frameworks -> what to type; {n} stands for the number given with the word
    words: Mapping[str, str] = field(default_factory=dict)
    synonyms: Mapping[str, str] = field(default_factory=dict)  # option -> names in other frameworks, space-separated
    default: bool = False  # whether the part is a default of its core group; a list group has all defaults, in order
    layout_dependent: str = ""  # how results with this part depend on the layout; "": layout-invariant

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"part name {self.name!r} must consist of lower-case letters, digits, '_', '-' and '.'")
        if not is_dataclass(self.config):
            raise TypeError(f"part {self.name!r}: config must be a dataclass, got {self.config!r}")
        if not _BUILD.fullmatch(self.build):
            raise ValueError(f"part {self.name!r}: build must have the form 'package.module:name', got {self.build!r}")
        if wrong := sorted(set(self.views) - set(self.opens)):
            raise ValueError(f"part {self.name!r}: `views` has {', '.join(wrong)}, which is missing in `opens`")
        if wrong := [need for need in self.needs if not _NEED.fullmatch(need)]:
            raise ValueError(f"part {self.name!r}: needs must have the form 'group=name', got {wrong[0]!r}")
        if not self.summary or "\n" in self.summary:
            raise ValueError(f"part {self.name!r}: summary must be one line")
