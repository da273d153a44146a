"""Keys and base URLs in files: how they are written, and whether others can read the keys."""

from __future__ import annotations

import stat
import subprocess
import time
from pathlib import Path

from anaphora.probes.doctor.base_urls import flaw, openai_base
from anaphora.probes.doctor.keys import cleaned, expired_at, flaws, is_placeholder, is_reference
from anaphora.probes.doctor.source import Source

_GIT_SECONDS = 5.0


def check_stored_key(source: Source, line: int | None, name: str, value: object) -> None:
    """State changes: findings and secrets of the source."""
    if not isinstance(value, str) or not value.strip() or is_reference(value):
        return
    found = [flaw for flaw in flaws(value) if "placeholder" not in flaw]
    if is_placeholder(value):
        if value.strip().lower().startswith(("your", "<", "sk-xxx", "replace", "insert")):
            source.say("key.placeholder", line, name=name)
        return
    source.secrets += [value, cleaned(value)]
    if found:
        source.say("key.text", line, name=name, problem=" and ".join(found),
                   edit=source.edit(line, value, cleaned(value)))  # fmt: skip
    ended = expired_at(cleaned(value))
    if ended is not None:
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(ended))
        source.say("key.expired", line, name=name, when=when)
    check_committed(source, line, name)


def check_openai_base(source: Source, line: int | None, client: str, name: str, url: str) -> None:
    """A base URL of a client that wants /v1 in it. State changes: findings of the source."""
    if "$" in url or url.startswith("os.environ/"):
        return
    right = openai_base(url)
    if problem := flaw(url, right):
        edit = source.edit(line, url, right or "", safe=right is not None)
        shown = right or "http://127.0.0.1:8000/v1"
        source.say("base.openai", line, edit=edit, client=client, name=name, problem=problem, right=shown)


def check_committed(source: Source, line: int | None, name: str) -> None:
    """A secret in a file that git keeps, or would take with the next `git add`."""
    state = git_state(source.path)
    if state == "tracked":
        source.say("key.committed", line, name=name, file_name=source.path.name)
    elif state == "untracked":
        source.say("key.not-ignored", line, name=name, file_name=source.path.name)


def check_mode(source: Source) -> None:
    """A file of secrets that other users of the machine can read."""
    try:
        mode = stat.S_IMODE(source.path.stat().st_mode)
    except OSError:
        return
    if mode & 0o077:
        source.say("key.readable", evidence=f"mode {mode:04o}", path=source.path)


def git_state(path: Path) -> str:
    """ "tracked", "untracked" (and not ignored), "ignored", or "none" where there is no repository or no git."""
    folder = path.resolve().parent

    def git(*arguments: str) -> int:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_GIT_SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return 128
        return done.returncode

    if git("rev-parse", "--is-inside-work-tree") != 0:
        return "none"
    if git("ls-files", "--error-unmatch", "--", path.name) == 0:
        return "tracked"
    return "ignored" if git("check-ignore", "-q", "--", path.name) == 0 else "untracked"
