"""From a URL to a store: the built-in schemes, and those that installed packages register.

[project.entry-points."anaphora.remote_stores"]
s3 = "my_package.store:open_store"        # (url: str) -> RemoteStore
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from urllib.parse import urlsplit

from anaphora.errors import ConfigError
from anaphora.tiers.store import RemoteStore

ENTRY_POINT_GROUP = "anaphora.remote_stores"

_VALKEY = "anaphora.tiers.remote.valkey"
BUILT_IN: dict[str, tuple[str, str]] = {
    "valkey": (_VALKEY, "valkey"),
    "valkeys": (_VALKEY, "valkey"),
    "redis": (_VALKEY, "valkey"),
    "rediss": (_VALKEY, "valkey"),
    "unix": (_VALKEY, "valkey"),
    "mooncake": ("anaphora.tiers.remote.mooncake", "mooncake"),
}
"""URL scheme -> (module with `open_store`, extra that brings what the module imports)."""


def open_remote(url: str) -> RemoteStore:
    """The store behind `url`. It need not be up: it is connected to when it is first asked.

    Raises ConfigError for a scheme nobody knows, an extra that is not installed, or a URL that is wrong.
    """
    scheme = urlsplit(url).scheme.lower()
    if scheme in BUILT_IN:
        return _built_in(*BUILT_IN[scheme])(url)
    outside = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if scheme in outside:
        return _outside(outside[scheme])(url)
    known = ", ".join(f"{name}://" for name in sorted({*BUILT_IN, *outside}))
    raise ConfigError(
        f"no store is known for the scheme {scheme!r} of --remote-cache; use one of {known}, such as "
        "valkey://127.0.0.1:6379/0, or install a package that registers the scheme as an entry point of the group "
        f"{ENTRY_POINT_GROUP}"
    )


def _built_in(module: str, extra: str) -> Callable[[str], RemoteStore]:
    try:
        factory: Callable[[str], RemoteStore] = import_module(module).open_store
    except ImportError as error:
        raise ConfigError(_what_to_install(error, extra)) from error
    return factory


def _what_to_install(error: ImportError, extra: str) -> str:
    missing = str(error)
    if "libibverbs" in missing or "librdmacm" in missing:
        return f"Mooncake's client needs two system libraries ({missing}); apt-get install libibverbs1 librdmacm1"
    return f"this store needs a package that is not installed ({missing}); pip install 'anaphora[{extra}]'"


def _outside(point: EntryPoint) -> Callable[[str], RemoteStore]:
    try:
        factory: Callable[[str], RemoteStore] = point.load()
    except Exception as error:  # whatever an outside package's import does
        raise ConfigError(
            f"the package behind {point.name}:// ({point.value}) cannot be loaded: {error}; update or remove it"
        ) from error
    return factory
