"""The ASGI application: routes, middleware, errors and the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

import anaphora
from anaphora.server import admin, chat, completions, explain
from anaphora.server.auth import OPEN_ROUTES, Authentication
from anaphora.server.errors import install_handlers
from anaphora.server.metrics import registry_of
from anaphora.server.middleware import BodyLimit, Outermost
from anaphora.server.settings import ServerState


class AnaphoraAPI(FastAPI):
    """FastAPI with a document that says what really happens: errors in OpenAI's shape, keys where they are asked."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            schemas = document["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            keyed = bool(self.state.server.settings.api_key_digests)
            if keyed:
                document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
                    if keyed and path not in OPEN_ROUTES:
                        operation["security"] = [{"key": []}]
        return self.openapi_schema or {}


def create_app(state: ServerState) -> FastAPI:
    """The whole server for one state; many may live in one process. The engine may come later (state.engine)."""
    app = AnaphoraAPI(
        title="Anaphora",
        version=anaphora.__version__,
        description="An OpenAI-compatible LLM server around the KV cache.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.server = state
    app.state.registry = registry_of(state)
    for module in (chat, completions, admin, explain):
        app.include_router(module.router)
    app.state.paths = tuple(app.openapi()["paths"])
    install_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=state.settings.max_body_bytes)
    if state.settings.api_key_digests:
        app.add_middleware(Authentication, digests=state.settings.api_key_digests)
    app.add_middleware(Outermost, state=state)
    return app
