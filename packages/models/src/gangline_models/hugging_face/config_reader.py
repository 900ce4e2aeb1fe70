"""Reader of config.json, field by field, which refuses fields that were not read. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gangline import UserError
from gangline_models.hugging_face.fields import check_value, refuse_unknown


class ConfigReader:
    """Reader of a config.json, whose `finish` refuses by name the fields that were not read.

    absent: value for a missing field, the default in transformers. A null field is read as None, not as `absent`.
    hint: type and range of the value, as for an option; another value raises UserError.
    holder: beginning of error messages; "": "DIRECTORY holds a model".
    """

    def __init__(self, directory: str | Path, hf_config: Mapping[str, Any], holder: str = "") -> None:
        self.directory, self._hf_config = directory, hf_config
        self.holder = holder or f"{directory} holds a model"
        self._asked: set[str] = set()

    def holds(self, name: str) -> bool:
        """Return whether the file has the field, even with value null."""
        return name in self._hf_config

    def take(self, name: str, absent: Any = None, hint: Any = Any) -> Any:
        """Return the field, which may be null, or `absent` if the file lacks it."""
        return self.check(name, self._get(name, absent), hint | None if hint is not Any else Any)

    def read_given(self, name: str, absent: Any, hint: Any = Any) -> Any:
        """Return a field that must not be null, or `absent` if the file lacks it. Raises UserError for null."""
        if (value := self._get(name, absent)) is None:
            raise self.explain(name, "null", "The field must not be null.")
        return self.check(name, value, hint)

    def require(self, name: str, hint: Any = Any) -> Any:
        """Return a required field. Raises UserError if it is missing or null."""
        if (value := self._get(name)) is None:
            raise self.explain_missing(name)
        return self.check(name, value, hint)

    def _get(self, name: str, absent: Any = None) -> Any:
        self._asked.add(name)
        return self._hf_config.get(name, absent)

    def check(self, name: str, value: Any, hint: Any) -> Any:
        """Return `value`, the value of field `name`. Raises UserError if the value does not fit `hint`."""
        return check_value(name, value, hint, self.holder)

    def expect(self, name: str, *values: Any) -> None:
        """Raise UserError if the field is present with a value not in `values`. Null and false count as equal."""
        value = self.take(name, values[0])
        off = (value is None or value is False) and (values[0] is None or values[0] is False)
        if value not in values and not off:
            supported = " or ".join(f"{name}={one}" for one in values)
            raise self.explain(name, value, f"gangline's model supports only {supported}.")

    def explain_missing(self, name: str) -> UserError:
        """Return the error for a missing required field."""
        return UserError(f"{self.directory}/config.json lacks {name}.")

    def explain(self, name: str, value: Any, why: str) -> UserError:
        """Return the error for an unsupported value of a field."""
        return UserError(f"{self.holder} with unsupported {name}={value}.", why)

    def finish(self) -> None:
        """Raise UserError if a field that was not read may change the model."""
        refuse_unknown(self.directory, self._hf_config, self._asked)
