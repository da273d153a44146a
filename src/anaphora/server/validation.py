"""What a client reads when its JSON does not have the expected shape: the field, what belongs there, what came."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from anaphora.errors import InvalidRequest

EXPECTED: Mapping[str, str] = {
    "string_type": "a string",
    "string_unicode": "a string of valid Unicode, without lone surrogates",
    "string_too_short": "a string of at least {min_length} character(s)",
    "string_too_long": "a string of at most {max_length} characters",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
    "too_short": "a list of at least {min_length} item(s)",
    "too_long": "a list of at most {max_length} items",
}
"""pydantic's error types -> what belongs there."""

UNREADABLE: Mapping[type[BaseException], str] = {
    UnicodeDecodeError: "it is not UTF-8",
    RecursionError: "it is nested too deeply",
    ValueError: "a number in it has too many digits",
}


def refusal(error: RequestValidationError) -> InvalidRequest:
    """One sentence for the deepest field that is wrong; `param` is its path, such as messages[0].role."""
    errors: Sequence[Mapping[str, Any]] = error.errors()
    if errors[0]["type"] == "json_invalid":
        return _bad_json(error.__cause__)
    if not isinstance(error.body, dict):
        got = "nothing" if errors[0]["type"] == "missing" else _describe(error.body)
        return InvalidRequest(f"The body must be a JSON object; got {got}.", code="invalid_body")
    paths = [_path(each["loc"][1:], error.body, missing=each["type"] == "missing") for each in errors]
    deepest = max(paths, key=len)
    here = [each for each, path in zip(errors, paths, strict=True) if path == deepest]
    name = _spell(deepest)
    if here[0]["type"] == "missing":
        return InvalidRequest(f"`{name}` is required; add it.", param=name, code="missing_required_parameter")
    wanted = dict.fromkeys(_wanted(each) for each in here)
    return InvalidRequest(
        f"`{name}` must be {' or '.join(wanted)}; got {_describe(here[0]['input'])}.", param=name, code="invalid_value"
    )


def unreadable_body(cause: BaseException) -> InvalidRequest:
    """For bodies that fail before there is any JSON to speak of."""
    why = next((text for kind, text in UNREADABLE.items() if isinstance(cause, kind)), "it is not JSON")
    return InvalidRequest(f"The body cannot be read as JSON: {why}.", code="invalid_json")


def _bad_json(cause: BaseException | None) -> InvalidRequest:
    if not isinstance(cause, json.JSONDecodeError):
        return InvalidRequest("The body is not valid JSON.", code="invalid_json")
    where = f"line {cause.lineno}, column {cause.colno} (character {cause.pos})"
    return InvalidRequest(f"The body is not valid JSON: {cause.msg} at {where}.", code="invalid_json")


def _path(loc: Sequence[str | int], body: Any, *, missing: bool) -> tuple[str | int, ...]:
    """The part of pydantic's `loc` that lies in the body; names of union members are dropped."""
    path: list[str | int] = []
    for position, step in enumerate(loc):
        match body:
            case dict() if step in body:
                body = body[step]
            case list() if isinstance(step, int):
                body = body[step]
            case _ if not (missing and position == len(loc) - 1):
                continue
        path.append(step)
    return tuple(path)


def _spell(path: Sequence[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def _wanted(error: Mapping[str, Any]) -> str:
    template = EXPECTED.get(error["type"])
    context = {name: _number(value) for name, value in error.get("ctx", {}).items()}
    return template.format(**context) if template else "something else"


def _number(value: object) -> object:
    """2.0 -> 2"""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _describe(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            shown = value if len(value) <= 40 else value[:40] + "…"
            return f"the string {json.dumps(shown)}"
        case int() | float():
            shown = repr(value)
            return f"the number {shown}" if len(shown) <= 40 else "a very long number"
        case list():
            return f"a list of {len(value)} item(s)"
        case dict():
            return "an object"
    return f"a {type(value).__name__}"
