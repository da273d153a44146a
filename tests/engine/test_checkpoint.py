from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from anaphora.engine.models.checkpoint import Checkpoint
from anaphora.errors import CorruptModel, InputError, UnsupportedModel

CPU = torch.device("cpu")
A = torch.arange(12, dtype=torch.float32).view(3, 4)
B = -torch.arange(8, dtype=torch.float32).view(2, 4)
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def single(folder: Path) -> Path:
    save_file({"a.weight": A, "b.weight": B}, folder / "model.safetensors")
    return folder


def sharded(folder: Path) -> Path:
    save_file({"a.weight": A}, folder / FIRST)
    save_file({"b.weight": B}, folder / SECOND)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a.weight": FIRST, "b.weight": SECOND}}))
    return folder


def read_all(folder: Path) -> torch.Tensor:
    return Checkpoint(folder, {}).read([("a.weight", (3, 4)), ("b.weight", (2, 4))], torch.float64, CPU)


@pytest.mark.parametrize("make", [single, sharded])
def test_reads_and_stacks(make: Callable[[Path], Path], tmp_path: Path) -> None:
    whole = read_all(make(tmp_path))
    assert whole.dtype == torch.float64
    assert torch.equal(whole, torch.cat([A, B]).double())


def test_what_was_read_does_not_depend_on_the_file(tmp_path: Path) -> None:
    whole = Checkpoint(single(tmp_path), {}).read([("a.weight", (3, 4))], torch.float32, CPU)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(0)
    assert torch.equal(whole, A)


def test_digest_is_of_the_bytes(tmp_path: Path) -> None:
    digests = []
    for index, tensor in enumerate((A, A, A + torch.eye(3, 4) * 1e-6)):
        folder = tmp_path / str(index)
        folder.mkdir()
        save_file({"a.weight": tensor}, folder / "model.safetensors")
        digests.append(Checkpoint(folder, {}).digest())
    assert digests[0] == digests[1] != digests[2]
    assert len(bytes.fromhex(digests[0])) == 16


def lose_shard(folder: Path) -> None:
    (sharded(folder) / SECOND).unlink()


def cut_short(folder: Path) -> None:
    with (single(folder) / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 4)


def cut_shard_short(folder: Path) -> None:
    with (sharded(folder) / SECOND).open("r+b") as file:
        file.truncate(file.seek(0, 2) - 4)


def damage_header(folder: Path) -> None:
    with (single(folder) / "model.safetensors").open("r+b") as file:
        file.seek(9)
        file.write(b"\x00\x00\x00")


def empty_file(folder: Path) -> None:
    (folder / "model.safetensors").touch()


def damage_index(folder: Path) -> None:
    (sharded(folder) / INDEX).write_text('{"weight_map": ')


def leave_the_folder(folder: Path) -> None:
    (sharded(folder) / INDEX).write_text(json.dumps({"weight_map": {"a.weight": "../other.safetensors"}}))


def misplace(folder: Path) -> None:
    save_file({"c.weight": B}, sharded(folder) / SECOND)


def lose_tensor(folder: Path) -> None:
    save_file({"a.weight": A}, folder / "model.safetensors")


def change_shape(folder: Path) -> None:
    save_file({"a.weight": A, "b.weight": B.T.contiguous()}, folder / "model.safetensors")


def put_nan(folder: Path) -> None:
    broken = B.clone()
    broken[1, 2] = torch.nan
    save_file({"a.weight": A, "b.weight": broken}, folder / "model.safetensors")


def put_infinities(folder: Path) -> None:
    broken = B.clone()
    broken[0, 0], broken[1, 2] = torch.inf, -torch.inf
    save_file({"a.weight": A, "b.weight": broken}, folder / "model.safetensors")


FAULTS: dict[Callable[[Path], None], tuple[type[InputError], list[str]]] = {
    lose_shard: (CorruptModel, [SECOND, "missing", INDEX]),
    cut_short: (CorruptModel, ["model.safetensors", "cut short", "fetch"]),
    cut_shard_short: (CorruptModel, [SECOND, "cut short", "fetch"]),
    damage_header: (CorruptModel, ["model.safetensors", "damaged", "fetch"]),
    empty_file: (CorruptModel, ["model.safetensors", "cut short", "fetch"]),
    damage_index: (CorruptModel, [INDEX, "not an index", "fetch"]),
    leave_the_folder: (CorruptModel, [INDEX, "outside the folder"]),
    misplace: (CorruptModel, [SECOND, "b.weight", "missing"]),
    lose_tensor: (CorruptModel, ["model.safetensors", "b.weight", "missing"]),
    change_shape: (CorruptModel, ["model.safetensors", "b.weight", "[4, 2]", "[2, 4]"]),
    put_nan: (CorruptModel, ["model.safetensors", "b.weight", "NaN"]),
    put_infinities: (CorruptModel, ["model.safetensors", "b.weight", "infinite"]),
    lambda folder: None: (CorruptModel, ["no model.safetensors", "fetch"]),
    lambda folder: (folder / "pytorch_model.bin").touch(): (UnsupportedModel, ["pytorch_model.bin", "safetensors"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: Callable[[Path], None], tmp_path: Path) -> None:
    error, words = FAULTS[fault]
    fault(tmp_path)
    with pytest.raises(error) as caught:
        read_all(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("fault", [put_nan, put_infinities])
def test_check_finite_reads_everything(fault: Callable[[Path], None], tmp_path: Path) -> None:
    fault(tmp_path)
    with pytest.raises(CorruptModel, match=r"b\.weight"):
        Checkpoint(tmp_path, {}).check_finite()
    Checkpoint(single(tmp_path), {}).check_finite()


def test_values_beyond_the_asked_dtype(tmp_path: Path) -> None:
    """Sound weights that float16 cannot hold are no corruption; a sum beyond its range is no fault at all."""
    save_file({"a.weight": torch.full((3, 4), 30_000.0)}, tmp_path / "model.safetensors")
    read = Checkpoint(tmp_path, {}).read([("a.weight", (3, 4))], torch.float16, CPU)
    assert bool((read == 30_000.0).all())
    save_file({"a.weight": torch.full((3, 4), 70_000.0)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="--dtype bfloat16"):
        Checkpoint(tmp_path, {}).read([("a.weight", (3, 4))], torch.float16, CPU)


def test_weights_that_are_quantised_without_a_word_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"a.weight": A.to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors: tensor a\.weight is torch\.int8"):
        Checkpoint(tmp_path, {}).read([("a.weight", (3, 4))], torch.float32, CPU)


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"quantised with awq.*unquantised"):
        Checkpoint(single(tmp_path), {"quantization_config": {"quant_method": "awq", "bits": 4}})
