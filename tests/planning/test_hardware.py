"""The catalogue of devices: plausible facts, forgiving names, and users' own files."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from anaphora.errors import ConfigError, HardwareNotFound
from anaphora.geometry.catalog_files import packaged_entries
from anaphora.planning import hardware
from anaphora.planning.hardware import GIB, Device, devices, find_device, search_devices

FOLDER = Path(hardware.__file__).with_name("catalog")


@pytest.fixture(autouse=True)
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user's hardware.toml would lie; nobody's own file is read by the tests."""
    monkeypatch.setenv("ANAPHORA_CONFIG_DIR", str(tmp_path))
    return tmp_path / "hardware.toml"


def test_there_are_many_devices_and_no_name_twice() -> None:
    found = devices()
    assert len(found) >= 150
    names = [name for device in found for name in (device.id, *device.aliases)]
    assert sorted(names) == sorted(set(names))
    assert len({device.name for device in found}) == len(found)
    for family in (
        "rtx-20",
        "rtx-30",
        "rtx-40",
        "rtx-50",
        "rtx-pro",
        "jetson",
        "mi3",
        "apple-m",
        "epyc",
        "xeon",
        "tpu",
    ):
        assert search_devices(family), family


def test_entries_read_one_by_one_are_the_whole_files() -> None:
    whole = [
        (table["id"], *table.get("aliases", ()))
        for path in sorted(FOLDER.glob("*.toml"))
        for table in tomllib.loads(path.read_text(encoding="utf-8"))["device"]
    ]
    assert [entry.names for entry in packaged_entries(FOLDER, "device")] == whole


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.id)
def test_every_device_is_plausible_and_has_its_source(device: Device) -> None:
    assert len(device.source) > 10
    assert device.vendor
    assert 40e9 < device.bandwidth < 10e12
    if device.kind in ("gpu", "tpu"):
        assert device.memory_bytes is not None
        assert 5 * GIB < device.memory_bytes < 300 * GIB
        assert ("memory" in device.source) or device.id == "h800"
        assert device.flops_16
    else:
        assert device.memory_bytes is None or device.vendor == "NVIDIA"
    for rate in device.flops.values():
        assert 2e12 <= rate <= 2e16
    if device.flops_16 and device.flops_8:  # 8-bit arithmetic is one to four times as fast as 16-bit
        assert 0.99 <= device.flops_8 / device.flops_16 <= 4.1
    for options in (device.memory_options_gb,):
        assert list(options) == sorted(options)


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("a100-80gb", 79.25),
        ("h100", 79.18),
        ("rtx-4090", 23.65),
        ("a10g", 22.06),
        ("t4", 14.6),
        ("b200", 178.35),
        ("gb10", 119.7),
        ("rtx-5090", 31.4),
        ("l40s", 44.52),
        ("rtx-3090", 23.58),
        ("h200", 139.81),
        ("a40", 44.42),
    ],
)
def test_memory_is_what_engines_reported(name: str, gib: float) -> None:
    device = find_device(name)
    assert device.memory_measured
    assert device.memory_bytes == pytest.approx(gib * GIB, rel=0.005)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("rtx-4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
        ("rtx_4070_ti_super", "rtx-4070-ti-super"),
        ("a100-80gb", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("a6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA GB10", "gb10"),
        ("DGX Spark", "gb10"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Radeon RX 7900 XTX", "rx-7900-xtx"),
        ("b580", "arc-b580"),
        ("TPU v5e", "tpu-v5e"),
    ],
)
def test_names_as_people_and_drivers_write_them(name: str, found: str) -> None:
    assert find_device(name).id == found


def test_memory_is_chosen_by_suffix_or_argument() -> None:
    assert find_device("m3-max-64gb") == find_device("Apple M3 Max", memory_gb=64)
    # Metal's recommendedMaxWorkingSetSize: 51,539.61 MB on a 64 GB Mac, 22,906.50 MB on a 32 GB one
    assert find_device("m3-max 64 GB").memory_bytes == 51_539_607_552
    assert find_device("m1-pro-32gb").memory_bytes == 22_906_492_245
    assert find_device("epyc-genoa-768gb").memory_bytes == 768 * GIB
    assert find_device("ddr5-5600-x2", memory_gb=64).id == "ddr5-5600-x2-64gb"


def test_memory_left_open_or_impossible() -> None:
    with pytest.raises(HardwareNotFound, match="comes with 48, 64, 128 GB; say how much: apple-m3-max-48gb"):
        find_device("m3-max")
    with pytest.raises(HardwareNotFound, match="takes any amount of memory; say how much: epyc-genoa-64gb"):
        find_device("epyc-genoa")
    with pytest.raises(ConfigError, match="does not come with 50 GB; choose one of 48, 64, 128"):
        find_device("m3-max-50gb")
    with pytest.raises(ConfigError, match="choose one of 1 and up"):
        find_device("epyc-genoa", memory_gb=0)
    with pytest.raises(ConfigError, match=r"soldered on \(23\.65 GiB\)"):
        find_device("rtx-4090", memory_gb=48)
    with pytest.raises(HardwareNotFound, match=r"'rtx-4090-48gb'; nearest names: .*rtx-4090"):
        find_device("rtx-4090-48gb")


@pytest.mark.parametrize("name", ["6000", "", "rtx", "banana"])
def test_an_unknown_or_ambiguous_name_is_not_guessed(name: str) -> None:
    with pytest.raises(HardwareNotFound, match="`anaphora hardware` lists all"):
        find_device(name)


def test_rates_by_width() -> None:
    assert find_device("t4").flops_16 == 65e12
    assert find_device("rtx-4090").flops_8 == 660.6e12
    assert find_device("epyc-rome-256gb").flops_16 == pytest.approx(64 * 2.25e9 * 32, rel=0.01)
    assert find_device("m4-16gb").flops_16 is None
    assert find_device("v100").flops_8 is None


def test_a_user_adds_devices_and_replaces_ours(user_file: Path) -> None:
    user_file.write_text(
        '[[device]]\nid = "rtx-4090-48gb"\nmemory_gib = 47.4\nbandwidth_gb_s = 1008\ntflops = { bf16 = 165 }\n\n'
        '[[device]]\nid = "t4"\nmemory_gib = 14\nbandwidth_gb_s = 320.5\n',
        encoding="utf-8",
    )
    modded = find_device("RTX 4090 48GB")
    assert (modded.memory_bytes, modded.flops_16, modded.source) == (int(47.4 * GIB), 165e12, str(user_file))
    assert find_device("T4").bandwidth == 320.5e9
    assert [device.id for device in devices()].count("t4") == 1


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("bandwidth_gb_s = 1", "line 1: x needs memory_gib"),
        ("memory_gib = 8", "line 1: x needs bandwidth_gb_s"),
        ("memory_gib = -8\nbandwidth_gb_s = 1", "line 3: memory_gib must be above 0"),
        ("memory_gib = true\nbandwidth_gb_s = 1", "line 3: memory_gib is True"),
        ('kind = "fpga"', "line 3: kind is one of gpu, unified, cpu, tpu"),
        ("memory_gb = 8", "line 3: no such key: memory_gb; did you mean memory_gib"),
        ('memory_gib = 8\nmemory_from = "guess"\nbandwidth_gb_s = 1', "line 4: memory_from is measured or derived"),
        ("memory_gib = 8\nbandwidth_gb_s = 1\ntflops = { fp17 = 1 }", "line 5: tflops holds rates above 0"),
        ('kind = "cpu"\nmemory_options_gb = ["8"]\nbandwidth_gb_s = 1', "line 4: memory_options_gb is a list of whole"),
    ],
)
def test_a_broken_user_file_is_named_with_its_line(user_file: Path, rest: str, message: str) -> None:
    user_file.write_text(f'[[device]]\nid = "x"\n{rest}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"hardware\.toml, {message}"):
        devices()
