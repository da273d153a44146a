"""From options to tiers: what is wrong is said at the start, what fails later costs its tier only."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from anaphora.errors import ConfigError
from anaphora.tiers.build import TierConfig, open_hierarchy
from anaphora.tiers.memory import page_buffer
from anaphora.tiers.saving import WritePolicy
from anaphora.tiers.store import Outcome
from support.stored_blocks import SIZE, chain, payloads, room

MIB = 1 << 20


def test_every_option_together(tmp_path: Path) -> None:
    config = TierConfig(MIB, tmp_path, MIB, "valkey://127.0.0.1:1/0")  # nobody listens there
    tiers = open_hierarchy(config, SIZE, 16, pool=page_buffer(SIZE))
    assert [tier.store.name for tier in tiers.tiers] == ["ram", "disk", "remote"]
    blocks, into = chain("a", 4), room(4)
    save = tiers.computed(blocks, payloads(blocks))
    assert save is not None
    assert tiers.drain(30)
    found = tiers.lookup([block.key for block in blocks])
    load = tiers.load(blocks, into, found.places)
    assert tiers.drain(30)
    assert load.outcomes == [Outcome.OK] * 4
    assert into == payloads(blocks)
    tiers.close()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (TierConfig(ram_bytes=1000), "--ram-cache"),
        (TierConfig(disk_directory=Path("cache"), disk_bytes=18_000), "--disk-cache"),
        (TierConfig(remote_url="gopher://x"), "--remote-cache"),
        (TierConfig(ram_bytes=MIB, disk_directory=Path("cache"), disk_bytes=MIB, remote_url="gopher://x"), "gopher"),
    ],
)
def test_impossible_options_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: TierConfig, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        open_hierarchy(config, SIZE, 16)
    if config.disk_bytes == MIB:  # the folder was let go of
        open_hierarchy(TierConfig(disk_directory=Path("cache"), disk_bytes=MIB), SIZE, 16).close()


def test_a_disk_that_cannot_be_used_costs_only_its_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    config = TierConfig(MIB, tmp_path / "file", MIB, write_policy=WritePolicy.ON_EVICTION)
    with caplog.at_level(logging.WARNING):
        tiers = open_hierarchy(config, SIZE, 16)
    assert [tier.store.name for tier in tiers.tiers] == ["ram"]
    assert "Going on without a disk cache" in caplog.text
    assert "cannot be used" in tiers.stats().unavailable["disk"]
    tiers.close()


def test_a_folder_in_use_stops_the_start(tmp_path: Path) -> None:
    config = TierConfig(disk_directory=tmp_path, disk_bytes=MIB)
    first = open_hierarchy(config, SIZE, 16)
    with pytest.raises(ConfigError, match="in use by process"):
        open_hierarchy(config, SIZE, 16)
    first.close()
