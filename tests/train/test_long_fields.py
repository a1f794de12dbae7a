"""A field of a CSV file may be as long as a document."""

from pinscher.train import formats


def test_a_field_of_any_length_is_read(tmp_path):
    long = "word " * 60_000
    path = tmp_path / "train.csv"
    path.write_text(f'text,label\n"{long}",1\nshort,0\n')
    columns = formats.read(path)
    assert columns["text"] == [long, "short"]
