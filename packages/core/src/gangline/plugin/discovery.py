"""Discovery of the plugins in this environment, and checks of their parts. Torch-free.

Core loads the entry points itself, because pluggy silently skips a second plugin of the same name and stops at one
broken import. The discovery stores errors of plugins, which are reported when a run needs the part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, entry_points
from types import ModuleType
from typing import cast

import pluggy

from gangline.config.schema import EditConfig
from gangline.config.suggest import suggest_near
from gangline.errors import RAISED
from gangline.plugin import catalogue
from gangline.plugin.hooks import (
    BY_GROUP,
    BY_NAME,
    DISTRIBUTION,
    ENTRY_POINTS,
    HOOKS,
    LISTS,
    PROJECT,
    Command,
    Hook,
    Kind,
)
from gangline.plugin.parts import Part

VARIABLE = "GANGLINE_PLUGINS"  # environment variable: comma-separated plugins or distributions to load; "": core alone

_CONTRACT = re.compile(r"gangline\.v(\d+)")
_GROUP = re.compile(r"[a-z][a-z0-9_]*(/[a-z][a-z0-9_]*)*")
_RESERVED = {"run", "batch", "validate", "parts", "recipe", "resume", "from", "weights"}
_RESERVED |= {"edits", "extra", "references", "hydra"}


@dataclass(frozen=True)
class Offer:
    """An installed part, with its group and the distribution that supplies it."""

    part: Part
    group: str
    distribution: str
    version: str
    viewed: bool = False  # whether the part comes from another group (`Part.views`)

    @property
    def supplier(self) -> str:
        return f"{self.distribution} {self.version}".strip()

    @property
    def synonyms(self) -> dict[str, str]:
        """Path of an option -> its names in other frameworks (`Part.synonyms`)."""
        place = f"{self.group}.{self.part.name}" if self.group in LISTS else self.group.replace("/", ".")
        return {f"{place}.{option}": names for option, names in self.part.synonyms.items()}


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that is installed but unusable: its package, the reason, and the command that fixes it."""

    plugin: str
    distribution: str
    version: str
    why: str
    fix: str = ""
    error: BaseException | None = None

    @property
    def supplier(self) -> str:
        return f"{self.distribution} {self.version}".strip()


@dataclass
class Found:
    """Everything that the discovery of plugins found."""

    offers: dict[str, dict[str, Offer]] = field(default_factory=dict)
    commands: dict[str, Command] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)  # verb -> distribution that supplies it
    failures: list[BrokenPlugin] = field(default_factory=list)
    clashes: list[tuple[str, str]] = field(default_factory=list)  # (why no run can start, how to fix it)
    clashing: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)  # (group, name) -> the clash
    # (group, name) of a part -> reason why it cannot be built
    unbuilt: dict[tuple[str, str], BrokenPlugin] = field(default_factory=dict)
    modules: list[ModuleType] = field(default_factory=list)  # entry modules of the loaded plugins
    left_out: dict[str, str] = field(default_factory=dict)  # distribution -> its plugin, excluded by GANGLINE_PLUGINS


def discover(environ: Mapping[str, str]) -> Found:
    """Return the offers of core and of all plugins that GANGLINE_PLUGINS includes, with clashes and failures."""
    from gangline.plugin import builtin

    discovery, manager = Found(), pluggy.PluginManager(PROJECT)
    for module in dict.fromkeys(hook.spec.partition(":")[0] for hook in HOOKS):
        manager.add_hookspecs(import_module(module))
    own = find_version(DISTRIBUTION) or ""
    _add(discovery, DISTRIBUTION, own, _collect(manager, builtin, PROJECT, DISTRIBUTION, own))
    every = entry_points()
    ours = [entry for entry in every.select(group=ENTRY_POINTS) if normalise_name(get_owner(entry)) != DISTRIBUTION]
    suppliers = {entry.distribution for entry in catalogue.ENTRIES}
    ours.sort(key=lambda entry: normalise_name(get_owner(entry)) not in suppliers)  # a clash refuses the later plugin
    by_name: dict[str, list[EntryPoint]] = {}
    selection = _read_wanted(environ)
    for entry in ours:
        if selection is None or selection & {normalise_name(entry.name), normalise_name(get_owner(entry))}:
            by_name.setdefault(entry.name, []).append(entry)
        else:
            discovery.left_out[normalise_name(get_owner(entry))] = entry.name
    for name, entries in by_name.items():
        if len(entries) > 1 or name == PROJECT:
            _refuse_same_name(discovery, name, entries, [other for other in by_name if other != name])
        else:
            _load(discovery, manager, entries[0])
    _refuse_two_defaults(discovery)
    _fill_views(discovery)
    for offer in [offer for offers in discovery.offers.values() for offer in offers.values()]:
        if why := _explain_unbuilt(discovery, offer):
            plugin = next((entry.name for entry in ours if get_owner(entry) == offer.distribution), offer.distribution)
            failure = BrokenPlugin(plugin, offer.distribution, offer.version, *why)
            discovery.unbuilt[offer.group, offer.part.name] = failure
    ours_speak = {normalise_name(get_owner(entry)) for entry in ours}
    for group in sorted(every.groups - {ENTRY_POINTS}):
        contract = _CONTRACT.fullmatch(group)
        for entry in every.select(group=group) if contract else ():
            if contract and normalise_name(get_owner(entry)) not in ours_speak:
                _refuse_other_contract(discovery, entry, int(contract[1]))
    there = {normalise_name(name) for entry in ours for name in (entry.name, get_owner(entry))} | {
        PROJECT,
        DISTRIBUTION,
    }
    for name in sorted((selection or set()) - there):
        names = sorted({entry.name for entry in ours})
        fix = f"{suggest_near(name, names)} Installed plugins: {', '.join(names) or 'none'}.".strip()
        discovery.clashes.append((f"{VARIABLE} names {name!r}, which is not installed.", fix))
    return discovery


def find_version(dist: str) -> str | None:
    """Return the installed version of a distribution, or None if it is not installed, without importing it."""
    try:
        return distribution(dist).version
    except PackageNotFoundError:
        return None


def normalise_name(name: str) -> str:
    """Return a distribution's name in the normalised form that package indexes compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def get_owner(entry: EntryPoint) -> str:
    """Return the distribution that an entry point comes from."""
    return _get_identity(entry)[0]


def _get_identity(entry: EntryPoint) -> tuple[str, str]:
    """Return the name and the version of the distribution that an entry point comes from."""
    return _name_and_version(entry.dist) if entry.dist else (entry.value, "")


@cache
def _name_and_version(dist: Distribution) -> tuple[str, str]:
    """Return name and version of a distribution, cached because each read parses its metadata."""
    metadata = dist.metadata
    return metadata["Name"], metadata["Version"]


def _read_wanted(environ: Mapping[str, str]) -> set[str] | None:
    text = environ.get(VARIABLE)
    return None if text is None else {normalise_name(name.strip()) for name in text.split(",") if name.strip()}


def _load(found: Found, manager: pluggy.PluginManager, entry: EntryPoint) -> None:
    """Import one plugin and add what it offers; an error becomes a failure that names the plugin."""
    name, version = _get_identity(entry)
    try:
        module = entry.load()
    except RAISED as error:
        why = f"is installed but failed to import: {type(error).__name__}: {' '.join(str(error).split())}"
        fix = _suggest_fix(entry.dist, name, error)
        found.failures.append(BrokenPlugin(entry.name, name, version, why, fix, error))
        return
    try:
        offered = _collect(manager, module, entry.name, name, version)
        _check_classes(found, offered)
    except RAISED as error:
        if manager.has_plugin(entry.name):
            manager.unregister(name=entry.name)
        why = f"breaks the plugin contract: {type(error).__name__}: {' '.join(str(error).split())}"
        fix = f"Try  pip install --upgrade {name}"
        found.failures.append(BrokenPlugin(entry.name, name, version, why, fix, error))
        return
    found.modules.append(module)
    _add(found, name, version, offered)


def _collect(
    manager: pluggy.PluginManager, module: ModuleType, plugin: str, dist: str, version: str
) -> list[Offer | Command | Kind]:
    """Add a module to pluggy and return what its hooks offer. Raises TypeError or ValueError for an invalid part."""
    manager.register(module, name=plugin)
    manager.check_pending()  # an unknown hook would otherwise be ignored
    for name in sorted(BY_NAME.keys() & set(dir(module))):
        if callable(function := getattr(module, name)) and not hasattr(function, f"{PROJECT}_impl"):
            fix = "write @hookimpl above the function, and  from gangline import hookimpl"
            raise TypeError(f"the hook {name} is not marked with @hookimpl: {fix}")
    offered: list[Offer | Command | Kind] = []
    for caller in manager.get_hookcallers(module) or ():
        hook = BY_NAME[caller.name]
        functions = [impl.function for impl in caller.get_hookimpls() if impl.plugin is module]
        for thing in [thing for function in functions for thing in cast(Iterable[object], function())]:
            if not isinstance(thing, hook.yields):
                raise TypeError(f"{hook.name} returned {thing!r}, which is not a {hook.yields.__name__}")
            if isinstance(thing, Part):
                offered.append(Offer(thing, _group(hook, thing), dist, version))
            elif isinstance(thing, Command | Kind):
                offered.append(thing)
    return offered


def _add(found: Found, dist: str, version: str, offered: Iterable[Offer | Command | Kind]) -> None:
    for thing in offered:
        if isinstance(thing, Command):
            other = found.commands.setdefault(thing.name, thing)
            if other is not thing:
                found.clashes.append(_explain_clash(f"offer 'gangline {thing.name}'", f"{dist} {version}", other.run))
            found.owners.setdefault(thing.name, dist)
            continue
        if isinstance(thing, Kind):
            if found.kinds.setdefault(thing.name, thing) is not thing:
                names = f"{dist} {version}", found.kinds[thing.name].example
                found.clashes.append(_explain_clash(f"offer the kind of plugin {thing.name!r}", *names))
            continue
        place = thing.group, thing.part.name
        first = found.offers.setdefault(thing.group, {}).setdefault(thing.part.name, thing)
        if first is not thing:
            found.clashing[place] = _explain_clash(
                f"offer {thing.group}={thing.part.name}", first.supplier, thing.supplier
            )
            found.clashes.append(found.clashing[place])


def _refuse_two_defaults(found: Found) -> None:
    """Add a clash for each group with two default parts; a list group may have any number of defaults."""
    for group, offers in found.offers.items():
        usual = [offer for offer in offers.values() if offer.part.default]
        if group not in LISTS and len(usual) > 1:
            names = (f"{offer.supplier} ({offer.part.name})" for offer in usual)
            found.clashes.append(_explain_clash(f"have a default part of the group {group}", *names))


def _fill_views(found: Found) -> None:
    """Add the parts of one group to another (`Part.views`), except parts that open groups of their own.

    Two parts that fill one field from different groups are a clash: each field would offer the parts of both groups.
    """
    views: dict[str, tuple[str, str]] = {}  # place -> (group that fills it, part with this view)
    for offer in [offer for offers in list(found.offers.values()) for offer in offers.values()]:
        for inner, group in offer.part.views.items():
            place = f"{offer.group}/{inner}"
            source = f"{offer.group}={offer.part.name} ({offer.supplier}) from"
            first = views.setdefault(place, (group, source))
            if first[0] != group:
                what = f"two parts fill {place} from different groups: {first[1]} {first[0]}, {source} {group}."
                fix = f"Rename one of the fields, uninstall one package, or set {VARIABLE} to the plugins you want."
                found.clashes.append((what, fix))
            place_offers = found.offers.setdefault(place, {})
            for name, other in found.offers.get(group, {}).items():
                if not other.part.opens:
                    place_offers.setdefault(name, replace(other, group=place, viewed=True))


def _explain_clash(what: str, *who: str) -> tuple[str, str]:
    names = f"two installed packages {what}: {', '.join(sorted(who))}."
    return names, f"Uninstall one of the packages, or set {VARIABLE} to the plugins you want."


def _refuse_same_name(found: Found, name: str, entries: list[EntryPoint], others: list[str]) -> None:
    """Add a clash for packages that registered one plugin name; none is loaded, because the choice is ambiguous."""
    packages = [" ".join(_get_identity(entry)).strip() for entry in entries]
    packages = sorted([*packages, f"{PROJECT} itself"] if name == PROJECT else packages)
    count = "two" if len(packages) == 2 else len(packages)
    what = f"{count} installed packages claim the plugin name {name!r}: {', '.join(packages)}."
    selection = ",".join([*others, min(get_owner(entry) for entry in entries)])
    fix = f"Uninstall one of the packages, or choose the plugins you want:  export {VARIABLE}={selection}"
    found.clashes.append((what, fix))
    for entry in entries:
        why = f"claims the plugin name {name!r}, which several packages claim: {', '.join(packages)}"
        found.failures.append(BrokenPlugin(name, *_get_identity(entry), why, fix))


def _refuse_other_contract(found: Found, entry: EntryPoint, version: int) -> None:
    """Add a failure for a plugin of an older or newer contract version, without importing it."""
    own_version = int(ENTRY_POINTS.removeprefix("gangline.v"))
    why = f"implements plugin contract v{version}, but this gangline supports v{own_version}"
    fix = f"pip install --upgrade {DISTRIBUTION if version > own_version else get_owner(entry)}"
    found.failures.append(BrokenPlugin(entry.name, *_get_identity(entry), why, fix))


def _group(hook: Hook, part: Part) -> str:
    """Return the group of a part that this hook returned. Raises ValueError or TypeError if the part is invalid."""
    group = hook.group if part.group is None else part.group
    if group is None:
        raise ValueError(f"part {part.name!r} of {hook.name} must name its group")
    home = BY_GROUP.get(group, hook)  # the hook of the parts of this group
    if hook.group not in (None, group) or not issubclass(home.options, hook.options):
        allowed_group = f"the group {hook.group!r}" if hook.group else "a new group"
        other = f"; {home.name} offers parts of {group!r}" if home is not hook else ""
        raise ValueError(f"part {part.name!r} of {hook.name} must be in {allowed_group}, not in {group!r}{other}")
    if not _GROUP.fullmatch(group) or group in _RESERVED:
        raise ValueError(f"part {part.name!r}: {group!r} is reserved or not a valid name of a group")
    if group in LISTS and "." in part.name:
        raise ValueError(f"part {part.name!r}: the name must not contain dots, as in {group}.<name>.<option>")
    if not issubclass(part.config, home.options):
        what = f"{group}={part.name} of {hook.name}: its options {part.config.__name__}"
        raise TypeError(f"{what} must derive from gangline.config.{home.options.__name__}")
    own = [need for need in part.needs if need.endswith("=off") and need.partition("=")[0] not in BY_GROUP]
    if own:
        fix = "off is not a part; the check of the options can return a problem instead"
        raise ValueError(f"{group}={part.name}: needs cannot contain {own[0]}: {fix}")
    if part.default and group not in BY_GROUP:
        why = (
            "the part that opens the group names the default"
            if "/" in group
            else f"{group} is off unless a run chooses a part"
        )
        raise ValueError(f"{group}={part.name}: default=True has no effect: {why}; leave it out")
    return group


def _explain_unbuilt(found: Found, offer: Offer) -> tuple[str, str] | None:
    """Return (why choosing the part has no effect, how to fix it); None if core or another part builds it."""
    group = offer.group
    outer, nested, field = group.rpartition("/")
    if nested:
        if any(field in other.part.opens for other in found.offers.get(outer, {}).values()):
            return None
        why, dists = f"no part of {outer} opens the group {group}", sorted(catalogue.find_suppliers(outer))
        fix = f"pip install {dists[0]}" if dists else f'A part of {outer} must have  opens={{"{field}": <default>}}'
    else:
        others = [other.part for offers in found.offers.values() for other in offers.values()]
        edit = issubclass(offer.part.config, EditConfig)
        if group in BY_GROUP or edit or any(group in other.reads for other in others):
            return None
        why = (
            f"{group} is not a group of core, its options are not an EditConfig (model edit), and no part reads {group}"
        )
        fix = f'Declare the group in the part that builds it:  Part(..., reads=("{group}",))'
    return f"offers {group}={offer.part.name}, which is never built: {why}", fix


def _check_classes(before: Found, offered: Iterable[Offer | Command | Kind]) -> None:
    """Raise ValueError if two parts share a configuration class, because the class identifies the part."""
    class_offers = {offer.part.config: offer for offers in before.offers.values() for offer in offers.values()}
    for offer in [thing for thing in offered if isinstance(thing, Offer)]:
        other = class_offers.setdefault(offer.part.config, offer)
        if other is not offer:
            pair = f"{other.group}={other.part.name} and {offer.group}={offer.part.name}"
            raise ValueError(f"{pair} share the class {offer.part.config.__name__}; subclass it for one of the parts")


def _suggest_fix(dist: Distribution | None, name: str, error: BaseException) -> str:
    """Return what to try after a failed import; for a missing module, name the plugin's requirement."""
    missing = (getattr(error, "name", None) or "").partition(".")[0]
    for requirement in (dist.requires or ()) if dist and missing else ():
        text = requirement.partition(";")[0].strip()
        if normalise_name(re.split(r"[^\w.-]", text, maxsplit=1)[0]) == normalise_name(missing):
            return f"{name} requires {text}; try  pip install --upgrade {name}"
    return f"Try  pip install --upgrade {name}"
