"""The same tensors are the same file, byte by byte."""

import torch

from pinscher.store import file


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
