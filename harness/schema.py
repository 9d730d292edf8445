"""The published JSON Schemas of records, `schemas/record-N.json`, and the check of a value against one.

Records are checked whenever they are written or read, on machines that have no package for it, so the part of JSON
Schema (draft 2020-12) that our schemas use is written out here: the keywords in `KEYWORDS`. The tests hold it to the
package jsonschema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("schemas")
VERSION = 3
ANNOTATIONS = frozenset({"$schema", "$id", "$defs", "title", "description"})
KEYWORDS = frozenset(
    {"type", "enum", "const", "$ref", "allOf", "anyOf", "if", "then", "minimum"}
    | {"properties", "required", "additionalProperties", "items", "minItems", "maxItems"}
)
Schema = dict[str, Any] | bool


@cache
def record_schema(version: int) -> dict[str, Any]:
    """The schema of the records of a version. Raises ValueError for one that this harness does not know."""
    path = FOLDER / f"record-{version}.json"
    if not path.is_file():
        raise ValueError(f"records of version {version!r}; this harness knows up to version {VERSION}")
    return json.loads(path.read_text(encoding="utf-8"))


def record_fault(record: Any) -> str | None:
    """What is wrong with a record by the schema of the version it says it is of; None when nothing is."""
    version = record.get("schema") if isinstance(record, dict) else None
    if type(version) is not int:
        return "it is no record: an object with its version as schema"
    try:
        schema = record_schema(version)
    except ValueError as error:
        return str(error)
    return _version_fault(record["schema"], record.get("kind")) or fault(record, schema)


def _version_fault(version: int, kind: Any) -> str | None:
    """What is wrong with a record of a kind that only other versions have; None for a kind that none has."""
    having = [known for known in range(1, VERSION + 1) if kind in record_schema(known)["properties"]["kind"]["enum"]]
    if not having or version in having:
        return None
    known = f"from schema {having[0]} on" if version < having[0] else f"up to schema {having[-1]}"
    return f"/kind {kind} exists {known}, and /schema is {version}"


def fault(value: Any, schema: dict[str, Any]) -> str | None:
    """The first thing about a value that its schema does not allow, with its place in the value; None for nothing."""
    return next(_faults(value, schema, schema, ""), None)


def _faults(value: Any, schema: Schema, root: dict[str, Any], at: str) -> Iterator[str]:
    if isinstance(schema, bool):
        if not schema:
            yield f"{_name(at)} is not allowed"
        return
    if "$ref" in schema:
        yield from _faults(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, at)
    for part in schema.get("allOf", ()):
        yield from _faults(value, part, root, at)
    if "if" in schema and not any(_faults(value, schema["if"], root, at)):
        yield from _faults(value, schema["then"], root, at)
    if "anyOf" in schema:
        # The branch that says most of a value is the one that got furthest into it.
        branches = [list(_faults(value, part, root, at)) for part in schema["anyOf"]]
        if all(branches):
            yield max((found[0] for found in branches), key=lambda text: text.split(" ", 1)[0].count("/"))
    yield from _own_faults(value, schema, root, at)


def _own_faults(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str) -> Iterator[str]:
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{_name(at)} must be of type {' or '.join(kinds)}, got {_shown(value)}"
        return
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and not any(_same(value, one) for one in allowed):
        yield f"{_name(at)} must be {' or '.join(map(json.dumps, allowed))}, got {_shown(value)}"
    if _is(value, "number") and value < schema.get("minimum", value):
        yield f"{_name(at)} must be at least {schema['minimum']}, got {_shown(value)}"
    if isinstance(value, dict):
        for key in schema.get("required", ()):
            if key not in value:
                yield f"{_name(at)} lacks {key}"
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for key, item in value.items():
            yield from _faults(item, properties.get(key, others), root, f"{at}/{key}")
    if isinstance(value, list):
        least, most = schema.get("minItems", 0), schema.get("maxItems", len(value))
        if not least <= len(value) <= most:
            yield f"{_name(at)} must have {least} to {most} items, got {len(value)}"
        for i, item in enumerate(value):
            yield from _faults(item, schema.get("items", True), root, f"{at}/{i}")


def _is(value: Any, kind: str) -> bool:
    if kind == "null":
        return value is None
    if kind in ("boolean", "string", "object", "array"):
        return isinstance(value, {"boolean": bool, "string": str, "object": dict, "array": list}[kind])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return kind == "number" or isinstance(value, int) or value.is_integer()


def _same(a: Any, b: Any) -> bool:
    # In JSON true is not 1.
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _name(at: str) -> str:
    return at or "the record"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
