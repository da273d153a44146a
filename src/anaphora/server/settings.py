"""What the server was told, and what it knows while it runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from anaphora.engine.loop import EngineLoop
from anaphora.errors import ConfigError, EngineUnavailable, UnknownModel
from anaphora.explain.explainer import NUM_OUTCOMES
from anaphora.explain.memory import Bounded

_MOST_OWNERS = 2 * NUM_OUTCOMES
Condition = Literal["ok", "loading", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Resolved once, before the server starts. Raises ConfigError for combinations that mean nothing."""

    served_model_names: tuple[str, ...]
    """The names clients may use; the first stands in answers to requests that name none."""
    api_key_digests: tuple[bytes, ...] = field(default=(), repr=False)
    """From auth.hash_keys; empty = no key is asked for."""
    salt_by_key: bool = False
    """Each key sees only the cached prefixes that the same key made."""
    max_body_bytes: int = 8 * 1024 * 1024

    def __post_init__(self) -> None:
        if not self.served_model_names:
            raise ConfigError("No model name to serve: give at least one with --served-model-name.")
        if self.salt_by_key and not self.api_key_digests:
            raise ConfigError("--salt-by-key needs keys: add --api-key, or leave --salt-by-key out.")


class ServerState:
    """Shared by all requests of one app. `engine` is None until the model is loaded."""

    def __init__(self, settings: ServerSettings, engine: EngineLoop | None = None) -> None:
        self.settings = settings
        self.engine = engine
        self.failure: str | None = None
        """Why there will never be an engine; the engine's own failure is in `engine.failure`."""
        self.draining = False
        self.created = int(time.time())
        self.owners: Bounded[str, bytes] = Bounded(_MOST_OWNERS)
        """Answer's id -> digest of the caller's key; kept only where keys have caches of their own."""
        self.http_requests: Counter[tuple[str, str, str]] = Counter()
        """(method, route, status) -> answers given."""
        self.startup_seconds: Mapping[str, float] = {}
        """How long each part of the start took; set by whoever loads the model."""

    def condition(self) -> tuple[Condition, str]:
        """The server's health and a sentence that says what it means for the caller."""
        failure = self.failure or (self.engine.failure if self.engine else None)
        if failure:
            return "failed", f"The engine has stopped: {failure}. Restart the server."
        if self.draining:
            return "draining", "The server is shutting down; send the request to another one or try again later."
        if self.engine is None:
            return "loading", "The model is still loading; try again in a few seconds."
        return "ok", "Ready."

    def require_engine(self) -> EngineLoop:
        """The engine, if it takes requests now; raises EngineUnavailable."""
        condition, reason = self.condition()
        if condition != "ok" or self.engine is None:
            raise EngineUnavailable(reason)
        return self.engine

    def resolve_model(self, name: str | None) -> str:
        """The name to answer with; raises UnknownModel."""
        served = self.settings.served_model_names
        if name is None:
            return served[0]
        if name not in served:
            listed = ", ".join(f"`{each}`" for each in served)
            raise UnknownModel(f"The model `{name}` is not served here. Use one of: {listed}.", param="model")
        return name
