"""The files of a stored model: what is written is read, and damage is told in the name of the file and the tensor."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pinscher.store import file, payload
from pinscher.store.file import INDEX, SINGLE, Stored, files_of
from pinscher.store.streams import DamagedError
from tiny_store import MB, confined, flips, identical, joined, read_all, resealed, split, vector, write_tensors

torch.manual_seed(0)
WEIGHT = torch.randn(12, 20) * (torch.rand(12, 20) < 0.3)
PLAIN = {
    "a.bias": torch.randn(7),
    "b.scalar": torch.tensor(2.5),
    "c.empty": torch.empty(0, 3),
    "d.half": torch.randn(2, 3, 4).half(),
    "e.bfloat": torch.randn(3, 3).bfloat16(),
    "f.flag": torch.tensor([True, False]),
    "g.long": torch.arange(5),
    "h.bytes": torch.arange(6, dtype=torch.uint8).view(2, 3),
    "i.wide": torch.randn(2, 2, dtype=torch.float64),
    "j.eight": torch.randn(4, 4).to(torch.float8_e4m3fn),
}
PACKED = {
    "ü.weight": WEIGHT.T.contiguous(),
    "w.weight": WEIGHT,
    "x.weight": WEIGHT * 2,
}
WANTED = PLAIN | PACKED


def tensors() -> dict[str, torch.Tensor]:
    return PLAIN | {name: vector(payload.pack(weight)) for name, weight in PACKED.items()}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    file.write(tmp_path, tensors())
    return tmp_path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    file.write(tmp_path, tensors(), max_shard_size=500)
    assert len(files_of(tmp_path)) > 2
    return tmp_path


def check(folder: Path) -> None:
    with Stored(files_of(folder)) as stored:
        assert stored.names() == sorted(WANTED)
        found = dict(stored.items())
        assert all(identical(found[name], WANTED[name]) for name in WANTED)
        assert {name for name in WANTED if stored.head(name)} == set(PACKED)
        assert stored.head("w.weight").shape == (12, 20)
        assert all(identical(stored.raw(name), tensor) for name, tensor in tensors().items())


def test_tensors_of_every_kind_come_back_from_one_file(single):
    assert files_of(single) == [single / SINGLE]
    check(single)


def test_tensors_come_back_from_several_files(shards):
    names = [path.name for path in files_of(shards)]
    assert names == sorted(path.name for path in shards.glob("*.safetensors"))
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    check(shards)


def test_any_reader_of_safetensors_sees_the_tensors_and_the_metadata(single):
    assert {name: tensor.dtype for name, tensor in load_file(single / SINGLE).items()} == {
        name: tensor.dtype for name, tensor in tensors().items()
    }
    with safe_open(single / SINGLE, "pt") as opened:
        metadata = opened.metadata()
    assert (metadata["format"], metadata["pinscher"]) == ("pt", "1")
    assert metadata["checksums"] == "".join(file.checksum(name, tensors()[name]) for name in sorted(WANTED))


def test_a_checksum_covers_name_type_shape_and_bytes():
    tensor = torch.arange(6, dtype=torch.int32)
    known = file.checksum("a", tensor)
    assert known == "514195dd"  # files with it exist
    others = [
        ("b", tensor),
        ("a", tensor.view(2, 3)),
        ("a", tensor.view(torch.float32)),
        ("a", tensor.flip(0)),
        ("a", torch.cat([tensor[:5], tensor[5:] + 1])),
    ]
    assert known not in [file.checksum(*other) for other in others]


def test_a_file_is_mapped_and_not_copied(single):
    with Stored(files_of(single)) as stored:
        assert stored.names()
        assert str(single / SINGLE) in Path("/proc/self/maps").read_text()


def own_memory() -> int:
    """Bytes of this process that are not the pages of a file."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_reading_a_large_file_takes_no_more_memory_than_one_tensor(tmp_path):
    write_tensors(tmp_path / SINGLE, {f"t{number}": torch.ones(4 * MB) for number in range(6)})
    before, most = own_memory(), 0
    with Stored([tmp_path / SINGLE]) as stored:
        for _, tensor in stored.items():
            assert float(tensor.sum()) == 4 * MB
            most = max(most, own_memory() - before)
    assert most < 24 * MB  # a tensor has 16, the file 96


def test_a_closed_file_has_no_names(single):
    stored = Stored(files_of(single))
    stored.close()
    stored.close()
    assert stored.names() == []


def test_writing_does_not_change_what_it_writes(tmp_path):
    given = tensors()
    turned = {**given, "w.weight": given["w.weight"], "t": WEIGHT.T}
    before = {name: tensor.clone() for name, tensor in turned.items()}
    file.write(tmp_path, turned)
    assert all(identical(turned[name], before[name]) for name in turned)
    assert identical(read_all(tmp_path / SINGLE)["t"], WEIGHT.T.contiguous())


# Damage, told in the name of the file and the tensor.
@pytest.mark.parametrize("name", [name for name in WANTED if WANTED[name].numel()])
def test_a_changed_tensor_is_named(single, name):
    header, data = split((single / SINGLE).read_bytes())
    start, end = header[name]["data_offsets"]
    for place in (start, (start + end) // 2, end - 1):
        changed = data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]
        (single / SINGLE).write_bytes(joined(header, changed))
        with pytest.raises(DamagedError) as told:
            Stored(files_of(single))
        assert str(single / SINGLE) in str(told.value)
        assert f"{name} has the wrong checksum" in str(told.value)


def test_a_damaged_matrix_under_a_right_file_checksum_is_named(tmp_path):
    data = payload.pack(WEIGHT)
    broken = vector(data[:-1] + bytes([data[-1] ^ 1]))
    path = write_tensors(tmp_path / SINGLE, {"good": torch.ones(2), "w.weight": broken})
    with Stored([path]) as stored:
        assert stored.tensor("good").tolist() == [1, 1]
        for reading in (stored.tensor, stored.head, lambda _: dict(stored.items())):
            with pytest.raises(DamagedError, match=r"model\.safetensors: w\.weight: its checksum is wrong"):
                reading("w.weight")


def test_a_file_changed_anywhere_is_told_or_says_the_same(tmp_path):
    """Only blanks of the header can change without harm."""
    path = write_tensors(tmp_path / SINGLE, {"a": torch.arange(3.0), "w": vector(payload.pack(WEIGHT[:2, :5]))})
    whole, wanted = path.read_bytes(), read_all(path)

    def work() -> list[int]:
        harmless = unnamed = 0
        for damaged in flips(whole):
            path.write_bytes(damaged)
            try:
                found = read_all(path)
            except DamagedError as error:
                unnamed += str(path) not in str(error)
                continue
            assert found.keys() == wanted.keys()
            assert all(identical(found[name], wanted[name]) for name in wanted)
            harmless += 1
        return [harmless < 20, unnamed]

    assert confined(work) == ("returned", "[True, 0]")


def test_a_file_cut_short_anywhere_is_told(tmp_path):
    path = write_tensors(tmp_path / SINGLE, {"a": torch.arange(3.0), "w": vector(payload.pack(WEIGHT[:2, :5]))})
    whole = path.read_bytes()

    def work() -> str:
        for end in range(len(whole)):
            path.write_bytes(whole[:end])
            with pytest.raises(DamagedError, match="cannot be read"):
                read_all(path)
        return "fine"

    assert confined(work) == ("returned", "'fine'")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"pinscher": None}, "was not written by pinscher, or is damaged"),
        ({"pinscher": "2"}, "format version '2', this pinscher reads 1: update pinscher"),
        ({"pinscher": "9" * 5000}, "format version '99999999999999999999', this"),
        ({"checksums": None}, "wrong number of checksums"),
        ({"checksums": ""}, "wrong number of checksums"),
        ({"checksums": "0" * 8}, "wrong number of checksums"),
        ({"checksums": "0" * 24}, "wrong number of checksums"),
        ({"checksums": "0" * 16}, "a has the wrong checksum"),
        ({"checksums": "é" * 16}, "a has the wrong checksum"),
        ({"format": "tf"}, "damaged"),
        ({"format": None}, "damaged"),
    ],
)
def test_metadata_that_cannot_be_is_told(tmp_path, metadata, message):
    path = write_tensors(tmp_path / SINGLE, {"a": torch.ones(2), "b": torch.ones(3)}, **metadata)
    with pytest.raises(DamagedError, match=message) as told:
        Stored([path])
    assert str(path) in str(told.value)


def test_a_model_of_somebody_else_is_told(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / SINGLE)
    with pytest.raises(DamagedError, match="was not written by pinscher"):
        Stored(files_of(tmp_path))


def test_a_folder_without_a_model_is_told(tmp_path):
    with pytest.raises(DamagedError, match=r"holds no model\.safetensors"):
        files_of(tmp_path)
    with pytest.raises(DamagedError, match="cannot be read"):
        Stored([tmp_path / "nothing.safetensors"])
    (tmp_path / SINGLE).mkdir()
    with pytest.raises(DamagedError, match="cannot be read"):
        Stored(files_of(tmp_path))


def map_to(place: object) -> str:
    return json.dumps({"metadata": {}, "weight_map": {"a": place}})


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "above": (map_to("../model.safetensors"), "not a file of this folder"),
        "absolute": (map_to("/etc/passwd"), "not a file of this folder"),
        "absolute model": (map_to("/tmp/model.safetensors"), "not a file of this folder"),
        "below": (map_to("sub/model.safetensors"), "not a file of this folder"),
        "here": (map_to("./model.safetensors"), "not a file of this folder"),
        "dots": (map_to(".."), "not a file of this folder"),
        "nothing": (map_to(""), "not a file of this folder"),
        "another kind": (map_to("config.json"), "not a file of this folder"),
        "a number": (map_to(7), "not a file of this folder"),
        "null": (map_to(None), "not a file of this folder"),
        "a list": (map_to(["x.safetensors"]), "cannot be read"),
        "not there": (map_to("x.safetensors"), "lacks x.safetensors"),
        "with a NUL": (map_to("x\0.safetensors"), "lacks|not a file"),
        "with half a character": (map_to("\ud800.safetensors"), "lacks|not a file"),
        "too long": (map_to("x" * 300 + ".safetensors"), "lacks|not a file|cannot be read"),
        "no map": ("{}", "cannot be read"),
        "a list of it all": ("[1]", "cannot be read"),
        "map is a list": ('{"weight_map": [1]}', "cannot be read"),
        "map is empty": ('{"weight_map": {}}', "no|cannot be read"),
        "no JSON": ("{", "cannot be read"),
        "empty": ("", "cannot be read"),
        "too deep": ("[" * 100_000, "cannot be read"),
        "a huge number": ('{"weight_map": ' + "9" * 10_000 + "}", "cannot be read"),
    }.values(),
)
def test_an_index_with_tricks_is_refused(tmp_path, text, message):
    (tmp_path / "model").mkdir()
    write_tensors(tmp_path / SINGLE, {"a": torch.ones(2)})  # what a way up would find
    (tmp_path / "model" / INDEX).write_text(text)
    with pytest.raises(DamagedError, match=message):
        Stored(files_of(tmp_path / "model"))


def test_an_index_that_is_no_text_is_refused(tmp_path):
    (tmp_path / INDEX).write_bytes(b"\xff\xfe{}")
    with pytest.raises(DamagedError, match="cannot be read"):
        files_of(tmp_path)


def test_a_missing_shard_is_named(shards):
    lost = files_of(shards)[1]
    lost.unlink()
    with pytest.raises(DamagedError, match=f"lacks {lost.name}: the model is not complete"):
        files_of(shards)


def test_an_index_that_leaves_a_shard_out_is_refused(shards):
    """A changed index must not turn into a model that lacks weights."""
    index = json.loads((shards / INDEX).read_text())
    lost = files_of(shards)[1].name
    kept = {name: place for name, place in index["weight_map"].items() if place != lost}
    (shards / INDEX).write_text(json.dumps(index | {"weight_map": kept}))
    with pytest.raises(DamagedError):
        Stored(files_of(shards))


def test_a_name_in_two_shards_is_told(shards):
    first, second = files_of(shards)[:2]
    shutil.copy(first, second)
    with pytest.raises(DamagedError, match=f"{second.name} holds .* a second time"):
        Stored(files_of(shards))


def test_a_damaged_shard_is_named(shards):
    path = files_of(shards)[-1]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedError, match=path.name):
        Stored(files_of(shards))


def test_a_failed_opening_leaves_no_file_open(shards):
    paths = files_of(shards)
    paths[-1].write_bytes(b"no")
    with pytest.raises(DamagedError) as told:  # which keeps what was open alive
        Stored(paths)
    assert str(paths[0]) not in Path("/proc/self/maps").read_text()
    assert told.traceback


# Headers of safetensors, which its own reader must refuse, or we.
HEADERS = {
    "not JSON": b"no",
    "a list": [],
    "no dtype": {"a": {"shape": [1], "data_offsets": [0, 4]}},
    "unknown dtype": {"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}},
    "half a byte": {"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}},
    "six bits": {"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}},
    "scales of eight bits": {"a": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}},
    "huge shape": {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}},
    "overflowing shape": {"a": {"dtype": "F32", "shape": [2**63, 2, 1], "data_offsets": [0, 4]}},
    "empty and huge": {"a": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}},
    "empty and huge for torch": {"a": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}},
    "many dimensions": {"a": {"dtype": "F32", "shape": [1] * 5000, "data_offsets": [0, 4]}},
    "negative shape": {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
    "turned offsets": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
    "offsets past the end": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
    "offsets with a hole": {"a": {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}},
    "metadata of numbers": {"__metadata__": {"pinscher": 1}},
}


@pytest.mark.parametrize("cause", HEADERS)
def test_a_header_that_cannot_be_is_refused(tmp_path, cause):
    header = HEADERS[cause]
    if isinstance(header, dict) and "__metadata__" not in header:
        header = {"__metadata__": {"format": "pt", "pinscher": "1", "checksums": "0" * 8}, **header}
    (tmp_path / SINGLE).write_bytes(joined(header, bytes(4)))
    kind, message = confined(lambda: read_all(tmp_path / SINGLE), memory=64 * MB)
    assert kind == "raised DamagedError", message
    assert SINGLE in message


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 10**8 + 1, 10**6])
def test_a_header_longer_than_the_file_is_refused(tmp_path, size):
    (tmp_path / SINGLE).write_bytes(size.to_bytes(8, "little") + b"{}")
    assert confined(lambda: read_all(tmp_path / SINGLE), memory=64 * MB)[0] == "raised DamagedError"


def test_an_attacker_with_right_checksums_changes_only_what_is_declared(tmp_path):
    """A resealed payload of other values is a valid file, of just that matrix."""
    data = payload.pack(WEIGHT, codecs=("dense",))
    other = resealed(data[:20] + bytes(len(data) - 20))
    assert identical(read_all(write_tensors(tmp_path / SINGLE, {"w": vector(other)}))["w"], torch.zeros_like(WEIGHT))


def test_the_same_tensors_are_the_same_file(tmp_path):
    tensors = {f"größe.{i}": torch.arange(7.0) * i for i in range(3)}
    written = []
    for i in range(6):  # chance would order three entries alike six times in 7776 tries
        (tmp_path / str(i)).mkdir()
        (path,) = file.write(tmp_path / str(i), tensors)
        written.append(path.read_bytes())
    assert len(set(written)) == 1
    with file.Stored([path]) as stored:
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in stored.items())
