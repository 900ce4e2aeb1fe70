"""Interfaces of the capability `hugging_face`: conversion between a part's options and config.json. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from gangline import UserError
from gangline.config.suggest import suggest_near
from gangline.errors import RAISED
from gangline.plugin.catalogue import find_suppliers
from gangline.plugin.registry import installed, load

if TYPE_CHECKING:
    from pathlib import Path

    from gangline.config import EditConfig, ModelConfig, PartConfig

CAPABILITY = "hugging_face"


class ModelFormat(ABC):
    """Converter between a model's options and config.json: a capability of the model's part.

    The class has no constructor arguments.
    """

    architectures: tuple[str, ...] = ()  # values of `architectures` in config.json that `read` supports

    @abstractmethod
    def read(self, directory: str | Path, config: dict[str, Any]) -> ModelConfig:
        """Return the model options for this config.json, with initial weights from `directory`.

        config: content of config.json, with one of `architectures`. Raises UserError for unsupported features.
        """

    @abstractmethod
    def write(self, options: Any, dtype: str, max_position: int) -> dict[str, Any]:
        """Return the config.json of the model. Raises UserError for options that no architecture supports.

        dtype: dtype of the weights. max_position: sequence length of the run.
        """

    @abstractmethod
    def describe(self, options: Any) -> dict[str, Any]:
        """Return name -> value of the options that determine the model's outputs, with null options resolved.

        Two models with equal descriptions can load each other's weights.
        """


class EditFormat(ABC):
    """Converter between a model edit and fields of config.json: a capability of the edit's part.

    Without this capability an edited model cannot be exported to Hugging Face, unless the edit only wraps modules
    (LoRA). The class has no constructor arguments.
    """

    def read(self, cls: type[Any], config: dict[str, Any]) -> tuple[EditConfig, dict[str, Any]] | None:
        """Return (options of class `cls`, config.json of the model without the edit); None for models without it.

        Raises UserError for unsupported features.
        """
        return None

    @abstractmethod
    def write(self, options: Any, config: dict[str, Any]) -> dict[str, Any] | None:
        """Return the config.json of the edited model; None if no architecture has the edit.

        config: config.json of the model without the edit. Raises UserError, which names the options, if the
        architecture requires other options.
        """

    def has_weights(self, options: Any, directory: str | Path) -> bool:
        """Return whether the directory has the edit's weights; if not, the options that `read` returned are dropped."""
        return True


class SameModel(EditFormat):
    """Converter of an edit that does not change config.json, such as another loss."""

    def write(self, options: Any, config: dict[str, Any]) -> dict[str, Any]:
        return config


def find_model_format(architecture: str, directory: str | Path) -> ModelFormat:
    """Return the format of the only installed part with this architecture. Raises UserError for none or several."""
    offers, failures = dict[str, dict[str, ModelFormat]](), list[str]()
    for name, offer in sorted(installed().get_offers("model").items()):
        if spec := offer.part.capabilities.get(CAPABILITY):
            try:
                own: ModelFormat = load(spec)()
            except RAISED as error:
                failures.append(
                    f"The format of model={name} ({offer.distribution}) is missing: {type(error).__name__}: {error}"
                )
                continue
            for each in own.architectures:
                offers.setdefault(each, {})[f"model={name} ({offer.distribution})"] = own
    what = f"{directory} holds a model of architecture {architecture}, which cannot be loaded."
    claims = offers.get(architecture, {})
    if len(claims) > 1:
        raise UserError(
            what, f"{' and '.join(claims)} both support this architecture.", "Uninstall one of the two packages."
        )
    if not claims:
        hint = f"{suggest_near(architecture, list(offers))} Supported here: {', '.join(offers)}.".strip()
        more = f"Packages that support other architectures, if installed: {', '.join(find_suppliers('model'))}."
        raise UserError(what, hint, *failures, more)
    return next(iter(claims.values()))


def get_model_format(config: ModelConfig) -> ModelFormat | None:
    """Return the format of a model's part; None if the part has no capability `hugging_face`."""
    return _load_format(type(config))


def get_edit_format(cls: type[EditConfig]) -> EditFormat | None:
    """Return the format of the edit with this option class; None if it has no capability `hugging_face`."""
    return _load_format(cls)


def list_edit_classes() -> list[type[EditConfig]]:
    """Return the option classes of installed edits with capability `hugging_face`, without their presets."""
    every = [
        offer.part for group in sorted(installed().edit_groups()) for offer in installed().get_offers(group).values()
    ]
    return [part.config for part in every if CAPABILITY in part.capabilities]


def _load_format(cls: type[PartConfig]) -> Any:
    if not (spec := installed().get_capability(cls, CAPABILITY)):
        return None
    try:
        return load(spec)()
    except RAISED as error:
        what = f"the Hugging Face format of {cls.__module__}.{cls.__name__} cannot be loaded: {spec}."
        raise UserError(what, f"{type(error).__name__}: {error}", "Fix or uninstall the package.") from error
