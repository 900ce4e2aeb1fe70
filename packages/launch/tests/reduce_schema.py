"""Reduce published definitions (CRD) to the fields of our manifests: the files in `schemas/`.

python packages/launch/tests/reduce_schema.py CRD.yaml VERSION SOURCE

Every object of a manifest in `golden/` keeps the names of all its fields, so that an unknown field is found. Fields
that are in no manifest keep only their type. CEL rules, defaults and descriptions are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
KEPT = ("type", "required", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")
LICENSE = "Apache-2.0, The Kubernetes Authors. Reduced by reduce_schema.py."


def reduce(schema: dict[str, Any], values: Sequence[Any]) -> dict[str, Any]:
    """Return the part of `schema` that checks `values` and refuses unknown fields."""
    found = {key: schema[key] for key in KEPT if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
    if not values:
        return {"type": found["type"]} if "type" in found else {}
    if "properties" in schema:
        found["additionalProperties"] = False
        found["properties"] = {
            name: reduce(inner, [value[name] for value in values if name in value])
            for name, inner in schema["properties"].items()
        }
    elif isinstance(more := schema.get("additionalProperties"), dict):
        found["additionalProperties"] = reduce(more, [one for value in values for one in value.values()])
    if "items" in schema:
        found["items"] = reduce(schema["items"], [one for value in values for one in value])
    return found


def manifests(kind: str) -> Iterator[dict[str, Any]]:
    for path in sorted((HERE / "golden").glob("*.yaml")):
        yield from (each for each in yaml.safe_load_all(path.read_text()) if each["kind"] == kind)


def main(definition: str, version: str, source: str) -> None:
    spec = yaml.safe_load(Path(definition).read_text())["spec"]
    (one,) = (each for each in spec["versions"] if each["name"] == version)
    kind = spec["names"]["kind"]
    reduced = reduce(one["schema"]["openAPIV3Schema"], list(manifests(kind)))
    content = {"$comment": f"{source}, {version}. {LICENSE}", **reduced}
    path = HERE / "schemas" / f"{kind.lower()}-{version}.json"
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
