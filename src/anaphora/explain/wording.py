"""Outcomes in words: why, in one sentence, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from anaphora.explain.outcome import Cause, Miss


def reason(miss: Miss) -> str:
    """One sentence without a full stop."""
    return _REASONS[miss.cause](miss)


def advice(miss: Miss) -> str:
    """What to do; empty where nothing is wrong."""
    if miss.cause is Cause.DIVERGED and miss.difference is not None:
        return miss.difference.fix
    return _ADVICE.get(miss.cause, "")


def ago(seconds: float) -> str:
    """Rounded: 0.4 s, 12 s, 5 min, 3 h, 2 d."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size(nbytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.1f} {unit}"
    return f"{nbytes / 1024:.0f} KiB"


def _other(miss: Miss) -> str:
    return miss.other_request or "another request"


def _never_seen(miss: Miss) -> str:
    return f"nobody went on like this after token {miss.position:,}" if miss.position else "never seen"


def _diverged(miss: Miss) -> str:
    other = miss.other_request or "an earlier prompt"
    if miss.difference is None or not miss.difference.exact:
        return f"parts from {other} in the block that begins at token {miss.position:,}; its tokens are gone"
    return f"parts from {other} at token {miss.position:,}: {miss.difference.name}"


def _evicted(miss: Miss) -> str:
    since = f" {ago(miss.seconds_ago)} ago" if miss.seconds_ago is not None else ""
    more = ""
    if miss.more_blocks is not None and miss.more_bytes is not None:
        more = f"; {miss.more_blocks:,} more blocks ({_size(miss.more_bytes)}) would have kept it"
    return f"evicted{since} for {_other(miss)}{more}"


def _below_granularity(miss: Miss) -> str:
    if miss.tokens <= 1:
        return "the last token is always computed"
    return "cached, but not usable in part: tiers bring whole blocks, windows need those before, copies need room"


_REASONS: Mapping[Cause, Callable[[Miss], str]] = {
    Cause.NEVER_SEEN: _never_seen,
    Cause.DIVERGED: _diverged,
    Cause.EVICTED: _evicted,
    Cause.BELOW_GRANULARITY: _below_granularity,
    Cause.OTHER_NAMESPACE: lambda miss: (
        f"the first {miss.position + miss.known_tokens:,} tokens were computed for {_other(miss)}, under another salt"
    ),
    Cause.IN_PROGRESS: lambda miss: f"{_other(miss)} was still computing it, in a block that was not whole",
    Cause.LOAD_FAILED: lambda miss: (
        f"a tier did not bring {miss.known_tokens:,} of the tokens that it had, or not in time"
    ),
    Cause.CACHING_OFF: lambda miss: "prefix caching is off",
}

_ADVICE: Mapping[Cause, str] = {
    Cause.EVICTED: "Give the cache more room: --kv-memory, or a tier in RAM or on disk.",
    Cause.OTHER_NAMESPACE: "Send the same cache_salt, if these requests may share what they computed.",
    Cause.LOAD_FAILED: "See the server's log and `anaphora cache` for that tier.",
    Cause.CACHING_OFF: "Start the server without --no-enable-prefix-caching.",
}
