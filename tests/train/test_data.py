"""Rows are split honestly, and the same everywhere."""

import json
import os
import re
import subprocess
import sys
import warnings

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

from pinscher.errors import InputError
from pinscher.train import data, formats
from pinscher.train.data import Source, load
from pinscher.train.tasks import TASKS
from pinscher.train.tasks.glue import GLUE
from tiny_files import MRPC, QQP, SHIPPED, Tiny, as_parquet, numbers, put, sentence, table, tsv, write

# ---------------------------------------------------------------- splits


@pytest.fixture
def folder(tmp_path):
    put(tmp_path / "data" / "train.jsonl", table(50))
    put(tmp_path / "data" / "validation.jsonl", table(10, 100))
    put(tmp_path / "data" / "test.jsonl.gz", table(6, 200, label=-1))
    return tmp_path / "data"


def test_the_development_set_is_the_test_and_nothing_else(folder):
    task = Tiny()
    splits = load(task, Source(data=str(folder)))
    assert numbers(splits.tests["validation"]) == list(range(100, 110))
    assert list(splits.tests) == ["validation"]
    train, validation = numbers(splits.train), numbers(splits.validation)
    assert len(validation) == 5
    assert sorted(train + validation) == list(range(50))
    assert train == sorted(train)
    assert task.seen == [str(folder / "train.jsonl"), str(folder / "validation.jsonl")]
    assert "The validation set is 5 of 50 training rows, split off by seed 42." in splits.notes
    assert "0 of 10 rows of test 'validation' are also in the training set (same text)." in splits.notes


def test_a_validation_set_of_its_own_is_used_where_the_test_is_another(folder):
    put(folder / "test.jsonl.gz", table(6, 200))
    splits = load(Tiny(test_splits=("test",)), Source(data=str(folder)))
    assert numbers(splits.train) == list(range(50))
    assert numbers(splits.validation) == list(range(100, 110))
    assert numbers(splits.tests["test"]) == list(range(200, 206))
    assert not any("split off" in note for note in splits.notes)


ALIASES = {
    "train": "train.tsv TRAIN.csv trainset.csv eng.train msr_paraphrase_train.txt train-v1.1.json dart-full-train.json",
    "validation": "validation.parquet valid.txt dev.tsv devset.csv eng.testa.gz dev-v1.1.json dart-v1.1.1-full-dev.xml "
    "validation-00000-of-00001.parquet",
    "validation_matched": "dev_matched.tsv validation_matched.jsonl.gz",
    "validation_mismatched": "dev_mismatched.tsv validation_mismatched.tsv",
    "test": "test.tsv testset.csv testset_w_refs.csv eng.testb msr_paraphrase_test.txt dart-v1.1.1-full-test.xml",
}


@pytest.mark.parametrize(
    ("split", "name"), [(split, name) for split, names in ALIASES.items() for name in names.split()]
)
def test_a_folder_names_its_splits_as_it_likes(tmp_path, monkeypatch, split, name):
    monkeypatch.setattr(
        formats, "read", lambda path, *_: Dataset.from_list([{"text": path.name, "label": i} for i in (0, 1)])
    )
    first = "training.tsv" if split == "train" else "train.tsv"
    for file in {name, first, "README.md", "dev_ids.tsv", ".train.tsv"}:
        write(tmp_path / file, "")
    (tmp_path / "train").mkdir()
    task = Tiny(train_split="train" if split != "train" else "training", test_splits=(split,))
    splits = load(task, Source(data=str(tmp_path)))
    assert splits.tests[split]["text"][:] == [name] * 2


def test_a_folder_must_have_each_split_once(folder):
    put(folder / "dev.csv", [])
    with pytest.raises(
        InputError, match=r"has 2 files for split 'validation' \(dev.csv, validation.jsonl\): leave only one"
    ) as error:
        load(Tiny(), Source(data=str(folder)))
    sentence(error, folder)
    (folder / "dev.csv").unlink()
    with pytest.raises(
        InputError, match=r"no file or split 'validation_matched': .*\(test.jsonl.gz, train.jsonl, validation.jsonl\)"
    ):
        load(Tiny(test_splits=("validation", "validation_matched")), Source(data=str(folder)))
    (folder / "train.jsonl").unlink()
    with pytest.raises(InputError, match=r"no file or split 'train': .*\(test.jsonl.gz, validation.jsonl\)"):
        load(Tiny(), Source(data=str(folder)))
    with pytest.raises(InputError, match="nothing that can be read"):
        load(Tiny(), Source(data=str(folder.parent)))
    with pytest.raises(InputError, match=r"No such file or directory.*check --data"):
        load(Tiny(), Source(data=str(folder / "nowhere")))
    with pytest.raises(InputError, match="not a folder: give it with --train-file"):
        load(Tiny(), Source(data=str(folder / "validation.jsonl")))


def test_folders_as_benchmarks_ship_them(tmp_path):
    """MRPC and E2E come with the same rows twice, of which only one file is right; DART as JSON and as XML."""
    pairs = tsv(["Quality", *MRPC], *([str(i % 2), "1", "2", f"a {i}", f"b {i}"] for i in range(8)))
    for name in ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "train.tsv", "dev.tsv", "test.tsv"):
        write(tmp_path / "mrpc" / name, pairs if "paraphrase" not in name else "broken")
    write(tmp_path / "mrpc" / "dev_ids.tsv", "1\t2\n")
    splits = load(TASKS["mrpc"], Source(data=str(tmp_path / "mrpc")))
    assert len(splits.tests["validation"]) == 8
    assert "7 of 8 rows of test 'validation' are also in the training set (same sentence1, sentence2)." in splits.notes

    write(tmp_path / "old" / "msr_paraphrase_train.txt", pairs)
    write(tmp_path / "old" / "msr_paraphrase_test.txt", pairs)
    splits = load(TASKS["mrpc"], Source(data=str(tmp_path / "old")))
    assert list(splits.tests) == ["test"]
    assert any("msr_paraphrase_test.txt is the test" in note for note in splits.notes)

    for name in ("trainset", "devset", "testset_w_refs"):
        write(
            tmp_path / "e2e" / f"{name}.csv", "mr,ref\n" + "".join(f"name[{name} {i}],It is {i}.\n" for i in range(4))
        )
    write(tmp_path / "e2e" / "testset.csv", "MR\nname[A]\n")
    splits = load(TASKS["e2e"], Source(data=str(tmp_path / "e2e")))
    assert (len(splits.train), len(splits.validation), len(splits.tests["test"])) == (4, 4, 4)
    assert "0 of 4 rows of test 'test' are also in the training set (same source)." in splits.notes

    for name in ("train", "dev", "test"):
        rows = [
            {"tripleset": [["a", "b", f"{name} {i}"]], "annotations": [{"source": "s", "text": "t"}]} for i in range(3)
        ]
        write(tmp_path / "dart" / f"dart-v1.1.1-full-{name}.json", json.dumps(rows))
        write(tmp_path / "dart" / f"dart-v1.1.1-full-{name}.xml", "<broken>")
    assert len(load(TASKS["dart"], Source(data=str(tmp_path / "dart"))).tests["test"]) == 3


@pytest.mark.parametrize("name", sorted({key.split(",")[0].split()[0] for key in SHIPPED} & set(GLUE)))
def test_glue_folders_load_with_their_tasks(tmp_path, name):
    _, _, text, rows = SHIPPED[name]
    lines = text.split("\n")[:-1]
    body = lines if name == "cola" else lines[1:]
    many = "\n".join([*lines, *body * 3]) + "\n"
    write(tmp_path / "train.tsv", many)
    for split in TASKS[name].test_splits:
        write(tmp_path / (split.replace("validation", "dev") + ".tsv"), text)
    splits = load(TASKS[name], Source(data=str(tmp_path)))
    for test in splits.tests.values():
        assert test.to_list() == rows
    assert len(splits.train) + len(splits.validation) == len(rows) * 4


def test_what_datasets_saved(tmp_path):
    splits = DatasetDict(train=Dataset.from_list(table(20)), dev=Dataset.from_list(table(5, 50)))
    splits.save_to_disk(tmp_path / "all")
    found = load(Tiny(), Source(data=str(tmp_path / "all")))
    assert numbers(found.tests["validation"]) == list(range(50, 55))
    assert found.notes == load(Tiny(), Source(data=str(tmp_path / "all"))).notes
    with pytest.raises(InputError, match=r"no file or split 'test': .*\(train, dev\)"):
        load(Tiny(test_splits=("test",)), Source(data=str(tmp_path / "all")))
    splits["train"].save_to_disk(tmp_path / "one")
    found = load(Tiny(), Source(data=str(tmp_path / "one")))
    assert (len(found.train), len(found.validation), len(found.tests["test"])) == (16, 2, 2)
    (tmp_path / "all" / "dataset_dict.json").write_text("{")
    with pytest.raises(InputError, match=r"cannot be loaded .* save_to_disk") as error:
        load(Tiny(), Source(data=str(tmp_path / "all")))
    sentence(error, tmp_path / "all")


def test_files_one_by_one(tmp_path):
    train, valid, test = (put(tmp_path / f"{n}.jsonl", table(20, n)) for n in (0, 100, 200))
    splits = load(Tiny(), Source(train_file=train, validation_file=valid, test_file=test))
    assert [numbers(rows) for rows in (splits.train, splits.validation, splits.tests["test"])] == [
        list(range(n, n + 20)) for n in (0, 100, 200)
    ]
    splits = load(Tiny(), Source(train_file=train, test_file=test))
    assert (len(splits.train), len(splits.validation), len(splits.tests["test"])) == (18, 2, 20)
    splits = load(Tiny(), Source(train_file=train, validation_file=valid))
    assert (len(splits.train), len(splits.validation), len(splits.tests["test"])) == (18, 20, 2)
    for source in (Source(test_file=test), Source(validation_file=valid)):
        with pytest.raises(InputError, match="training needs --train-file too"):
            load(Tiny(), source)
    with pytest.raises(InputError, match="a test needs --test-file too"):
        load(Tiny(), Source(validation_file=valid), training=False)
    with pytest.raises(InputError, match="exclude each other"):
        load(Tiny(), Source(data=str(tmp_path), test_file=test))


def test_without_a_test_a_tenth_is_split_off_that_no_seed_changes(tmp_path):
    source = Source(train_file=put(tmp_path / "train.jsonl", table(200)))
    first, second = (load(Tiny(), source, seed=seed) for seed in (1, 2))
    assert any("20 of the rows of" in note and "split off as test" in note for note in first.notes)
    assert numbers(first.tests["test"]) == numbers(second.tests["test"])
    assert numbers(first.validation) != numbers(second.validation)
    assert numbers(load(Tiny(), source, seed=3, rows=10).tests["test"]) == numbers(first.tests["test"])
    for splits in (first, second):
        parts = [numbers(rows) for rows in (splits.train, splits.validation, splits.tests["test"])]
        assert [len(part) for part in parts] == [162, 18, 20]
        assert sorted(n for part in parts for n in part) == list(range(200))
    later = load(Tiny(), source, training=False)  # an evaluation finds the rows that training left out
    assert numbers(later.tests["test"]) == numbers(first.tests["test"])


def test_rows_limits_training_and_validation_together(folder):
    splits = load(Tiny(), Source(data=str(folder)), rows=20, validation_fraction=0.25)
    assert (len(splits.train), len(splits.validation), len(splits.tests["validation"])) == (15, 5, 10)
    assert "Only 20 of 50 training rows are used." in splits.notes
    more = load(Tiny(), Source(data=str(folder)), rows=30)
    few = {*numbers(splits.train), *numbers(splits.validation)}
    assert few < {*numbers(more.train), *numbers(more.validation)}
    assert len(load(Tiny(), Source(data=str(folder)), rows=1000).train) == 45
    own = Source(
        train_file=str(folder / "train.jsonl"),
        validation_file=str(folder / "validation.jsonl"),
        test_file=str(folder / "validation.jsonl"),
    )
    assert (len(load(Tiny(), own, rows=20).train), len(load(Tiny(), own, rows=1).train)) == (20, 1)


def test_what_cannot_be_split(tmp_path, folder):
    source = Source(data=str(folder))
    assert len(load(Tiny(), source, validation_fraction=0.001).validation) == 1
    assert len(load(Tiny(), source, rows=2).train) == 1
    with pytest.raises(InputError, match="of 1 rows none remains beside the validation set") as error:
        load(Tiny(), source, rows=1)
    sentence(error, folder / "train.jsonl")
    with pytest.raises(InputError, match="none remains"):
        load(Tiny(), source, validation_fraction=0.999)
    with pytest.raises(InputError, match="none remains beside the test set; give more, or --test-file"):
        load(Tiny(), Source(train_file=put(tmp_path / "one.jsonl", table(1))))
    for fraction in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(InputError, match="--validation-fraction must lie between"):
            load(Tiny(), source, validation_fraction=fraction)
    with pytest.raises(InputError, match="--rows must be at least 1"):
        load(Tiny(), source, rows=0)


def test_scores_need_labels(folder):
    source = Source(train_file=str(folder / "train.jsonl"), test_file=str(folder / "test.jsonl.gz"))
    with pytest.raises(InputError, match=r"has no labels \(label is -1\), and scores need them") as error:
        load(Tiny(), source)
    sentence(error, folder / "test.jsonl.gz")
    splits = load(Tiny(), Source(test_file=source.test_file), training=False)
    assert splits.train is None
    assert splits.validation is None
    assert splits.notes == (f"{source.test_file} has no labels: there are answers to it but no scores.",)
    with pytest.raises(InputError, match=r"test.jsonl.gz has no labels"):
        load(Tiny(), Source(train_file=source.test_file))


def test_rows_are_normalized_and_checked_with_the_files_name(tmp_path, folder):
    put(folder / "train.jsonl", [{"sentence": row["text"], "label": row["label"]} for row in table(9)])
    assert load(Tiny(), Source(data=str(folder))).train.column_names == ["text", "label"]
    put(folder / "validation.jsonl", [{"text": "a"}])
    with pytest.raises(InputError, match="no column 'label'") as error:
        load(Tiny(), Source(data=str(folder)))
    sentence(error, folder / "validation.jsonl")

    class Picky(Tiny):
        def normalized(self, rows):
            raise InputError("row 3 is empty.")

    with pytest.raises(InputError, match="row 3 is empty") as error:
        load(Picky(), Source(data=str(folder)))
    sentence(error, folder / "train.jsonl")


def test_notes_tell_of_skipped_and_shared_rows(tmp_path):
    rows = [[*"123", f"q{i}", "r", "1"] for i in range(8)]
    write(tmp_path / "train.tsv", tsv(QQP, *rows, ["broken"]))
    write(tmp_path / "dev.tsv", tsv(QQP, *([*"987", f"q{i}", "r", "0"] for i in (0, 1, 2, 3, 100)), ["x"], ["y"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        splits = load(TASKS["qqp"], Source(data=str(tmp_path)), validation_fraction=0.01)
    assert f"{tmp_path / 'train.tsv'}: 1 of 9 rows lack fields and were skipped." in splits.notes
    assert f"{tmp_path / 'dev.tsv'}: 2 of 7 rows lack fields and were skipped." in splits.notes
    left = 4 - sum(question in splits.validation["question1"] for question in ("q0", "q1", "q2", "q3"))
    assert (
        f"{left} of 5 rows of test 'validation' are also in the training set (same question1, question2)."
        in splits.notes
    )


# ---------------------------------------------------------------- the same everywhere

TWICE = """
import sys
from pinscher.train.data import Source, load
from pinscher.train.tasks import TASKS
splits = load(TASKS["rte"], Source(data=sys.argv[1]), seed=7)
print(splits.fingerprint, *splits.validation["sentence1"])
"""


def test_splits_and_fingerprint_are_the_same_in_any_process(tmp_path):
    rows = [{"sentence1": f"text {i}", "sentence2": "\u00e9", "label": i % 2} for i in range(40)]
    put(tmp_path / "train.jsonl", rows)
    put(tmp_path / "dev.jsonl", rows[:3])
    splits = load(TASKS["rte"], Source(data=str(tmp_path)), seed=7)
    here = " ".join([splits.fingerprint, *splits.validation["sentence1"]])
    other = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    there = subprocess.run(
        [sys.executable, "-c", TWICE, str(tmp_path)],
        env={**os.environ, "PYTHONHASHSEED": other},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == here
    # Written down, so that no new version of numpy, pyarrow or Python changes what was measured.
    assert here == ("c5a63eb8e84be6c9eefe0b45520505c6f58eebcf9602283617b444b08d42461a text 17 text 18 text 34 text 37")


def test_the_fingerprint_is_of_the_contents(tmp_path, folder):
    def of(**wishes):
        return load(Tiny(), Source(data=str(folder)), **wishes).fingerprint

    first = of()
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert first == of(seed=1) == of(rows=10) == of(validation_fraction=0.5)
    (folder / "train.jsonl").unlink()
    write(folder / "train.parquet", as_parquet([dict(reversed(row.items())) for row in table(50)]))
    assert of() == first  # neither the format nor the order of columns counts
    (folder / "train.parquet").unlink()
    put(folder / "train.jsonl", [*table(49), {"text": "text 49!", "label": 1}])
    assert of() != first
    put(folder / "train.jsonl", [*table(50)[1:], table(1)[0]])
    assert of() != first


@given(count=st.integers(1, 300), seed=st.integers(-(2**40), 2**70))
@settings(max_examples=50, deadline=None)
def test_any_seed_gives_an_order(count, seed):
    assert sorted(data._order(count, seed)) == list(range(count))
    assert list(data._order(count, seed)) == list(data._order(count, seed))
