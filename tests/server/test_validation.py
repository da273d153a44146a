"""Whatever JSON comes, what the client reads is ours: no field of any request has an unexplained type error."""

from __future__ import annotations

import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from anaphora.errors import RequestError
from anaphora.server.requests import Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from anaphora.server.validation import refusal

MODELS: list[type[Body]] = [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
INNER = ["role", "content", "type", "text", "include_usage", "1", "name"]
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from(["", "text", "\ud800"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=18) | st.dictionaries(st.sampled_from(INNER), inner), max_leaves=20
)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_refusal_is_a_sentence_about_a_field(model: type[Body], data: st.DataObject) -> None:
    valid = {"prompt": "a"} if model is CompletionRequest else {}
    names = st.sampled_from(sorted(model.model_fields))
    body = valid | data.draw(st.dictionaries(names, VALUES, max_size=3))
    try:
        model.model_validate(body)
    except ValidationError as error:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        refused: RequestError = refusal(RequestValidationError(errors, body=body))
    except RequestError as error:
        refused = error
    else:
        return
    message = str(refused)
    assert message.endswith((".", "?"))
    assert "something else" not in message
    assert not any(word in message.lower() for word in ("pydantic", "input should", "tagged", "constrained"))
    assert refused.param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", [-1] * 50),
        ("prompt", [[-1] * 50] * 50),
        ("prompt", ["\ud800"] * 50),
        ("stop_token_ids", ["x"] * 50),
        ("logit_bias", {str(i): "x" for i in range(50)}),
        ("logit_bias", {str(i): 101 for i in range(50)}),
        ("logit_bias", {str(i): float("nan") for i in range(50)}),
    ],
)
def test_one_wrong_item_is_enough(field: str, value: object) -> None:
    """A description of each of a million would hold up everybody else."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": "a", field: value})
    assert caught.value.error_count() == 1


def test_one_wrong_message_is_enough() -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"messages": [1] * 50})
    assert caught.value.error_count() == 1
