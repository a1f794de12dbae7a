"""The order of the data, and how much each micro-batch counts."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import tiny_models
from pinscher.train.batches import POOL, EpochSampler, counted, kind_of
from tiny_models import HEADS

IGNORED = -100
LENGTHS = st.lists(st.integers(1, 30), max_size=130)
few = settings(max_examples=60, deadline=None)


def order(sampler: EpochSampler, epoch: int = 0) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler)


def groups(indices: list[int], size: int) -> list[list[int]]:
    return [indices[i : i + size] for i in range(0, len(indices), size)]


# ------------------------------------------------------------ order


@few
@given(
    lengths=LENGTHS,
    size=st.integers(1, 9),
    grouped=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 99),
)
def test_every_epoch_is_a_permutation(lengths, size, grouped, seed, epoch):
    sampler = EpochSampler(len(lengths), seed, lengths if grouped else None, size)
    assert sorted(order(sampler, epoch)) == list(range(len(lengths)))
    assert len(sampler) == len(lengths)


@few
@given(lengths=LENGTHS, size=st.integers(1, 9), grouped=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_the_order_depends_on_seed_and_epoch_alone(lengths, size, grouped, seed):
    make = lambda: EpochSampler(len(lengths), seed, lengths if grouped else None, size)  # noqa: E731
    first = make()
    seen = [order(first, epoch) for epoch in range(3)]
    torch.rand(3)  # what else draws random numbers does not matter
    state = torch.get_rng_state()
    assert [order(make(), epoch) for epoch in (2, 0, 1)] == [seen[2], seen[0], seen[1]]
    assert torch.equal(torch.get_rng_state(), state)  # nor does it draw any of theirs


@pytest.mark.parametrize("lengths", [None, [i % 7 for i in range(60)]], ids=["plain", "grouped"])
def test_epochs_and_seeds_differ(lengths):
    seen = [order(EpochSampler(60, seed, lengths, 4), epoch) for seed in range(3) for epoch in range(5)]
    assert len({tuple(indices) for indices in seen}) == 15


def test_the_group_changes_nothing_without_lengths():
    assert order(EpochSampler(30, 3, None, 4)) == order(EpochSampler(30, 3, None, 7))


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("grouped", [False, True])
def test_no_row_and_one_row(rows, grouped):
    sampler = EpochSampler(rows, 0, [5] * rows if grouped else None, 4)
    assert order(sampler) == list(range(rows))


@few
@given(lengths=LENGTHS, size=st.integers(1, 9), seed=st.integers(0, 999))
def test_only_the_last_group_is_ragged_and_groups_are_alike(lengths, size, seed):
    """Within a pool the groups are the slices of the rows sorted by length; the smaller slice comes last of all."""
    found = groups(order(EpochSampler(len(lengths), seed, lengths, size)), size)
    assert all(len(group) == size for group in found[:-1])
    if len(lengths) <= POOL * size:
        wanted = groups(sorted(lengths, reverse=True), size)
        got = [[lengths[i] for i in group] for group in found]
        assert sorted(got) == sorted(wanted)
        assert not wanted or len(wanted[-1]) == size or got[-1] == wanted[-1]


def test_the_loader_sees_whole_groups():
    lengths = [1 + i % 11 for i in range(3 * POOL * 2 + 1)]
    batches = list(DataLoader(range(len(lengths)), batch_size=2, sampler=EpochSampler(len(lengths), 0, lengths, 2)))
    assert [len(batch) for batch in batches] == [2] * (3 * POOL) + [1]


def test_grouping_saves_padding_and_stays_random():
    lengths = torch.randint(1, 101, (1000,), generator=torch.Generator().manual_seed(0)).tolist()

    def padding(indices):
        found = groups([lengths[i] for i in indices], 8)
        return sum(max(group) * len(group) - sum(group) for group in found)

    plain, grouped = (EpochSampler(1000, 0, some, 8) for some in (None, lengths))
    for epoch in range(3):
        assert padding(order(grouped, epoch)) < padding(order(plain, epoch)) / 10
    longest = [max(lengths[i] for i in group) for group in groups(order(grouped), 8)]
    assert longest != sorted(longest)  # long and short groups come mixed
    assert longest != sorted(longest, reverse=True)


# ------------------------------------------------------------ what counts


def slowly(batch: dict[str, torch.Tensor], kind: str) -> int:
    number = 0
    for row in range(len(batch["input_ids"])):
        if kind in ("regression", "spans"):
            number += 1
        elif kind == "classes":
            number += int(batch["labels"][row]) != IGNORED
        else:
            first = 1 if kind == "causal-lm" else 0
            number += sum(label != IGNORED for label in batch["labels"][row].tolist()[first:])
    return number


@few
@given(st.data())
@pytest.mark.parametrize("kind", ["classes", "regression", "tokens", "spans", "causal-lm", "seq2seq-lm"])
def test_counted_against_a_slow_loop(kind, data):
    rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    batch = {"input_ids": torch.ones(rows, width, dtype=torch.long)}
    label = st.sampled_from([IGNORED, 0, 1, 2])
    if kind == "classes":
        batch["labels"] = torch.tensor(data.draw(st.lists(label, min_size=rows, max_size=rows)))
    elif kind == "regression":
        batch["labels"] = torch.rand(rows)
    elif kind == "spans":
        batch |= {"start_positions": torch.zeros(rows, dtype=torch.long), "end_positions": torch.zeros(rows).long()}
    else:
        line = st.lists(label, min_size=width, max_size=width)
        batch["labels"] = torch.tensor(data.draw(st.lists(line, min_size=rows, max_size=rows)))
    assert counted(batch, kind) == slowly(batch, kind)


def test_several_labels_a_row_and_no_labels_count_rows():
    ids = torch.ones(3, 4, dtype=torch.long)
    assert counted({"input_ids": ids, "labels": torch.ones(3, 5)}, "classes") == 3  # multi-label targets are floats
    assert counted({"input_ids": ids}, "classes") == 3
    assert counted({"return_dict": True, "scale": torch.tensor(1.0), "input_ids": ids}, "") == 3


@pytest.mark.parametrize("name", HEADS)
def test_means_weighted_by_the_count_make_the_mean_of_all(name, monkeypatch):
    """That is what `counted` is for, and only the models' own losses can say whether it is right."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # some losses come down to float32 otherwise
    head = HEADS[name]
    model, collate = head.make().double().eval(), tiny_models.collator(head.kind)
    rows = tiny_models.rows(head.kind, 7).to_list()
    parts = [collate(rows[i:j]) for i, j in ((0, 1), (1, 3), (3, 7))]
    with torch.no_grad():
        whole = model(**collate(rows)).loss
        total = sum(model(**part).loss * counted(part, head.kind) for part in parts)
    assert float(total / sum(counted(part, head.kind) for part in parts)) == pytest.approx(float(whole), rel=1e-12)


# ------------------------------------------------------------ kinds


KINDS = {
    "classes": [
        *("BertForSequenceClassification", "RobertaForSequenceClassification", "DistilBertForSequenceClassification"),
        *("GPT2ForSequenceClassification", "LlamaForSequenceClassification", "T5ForSequenceClassification"),
    ],
    "tokens": [
        *("BertForTokenClassification", "RobertaForTokenClassification", "DistilBertForTokenClassification"),
        *("GPT2ForTokenClassification", "LlamaForTokenClassification", "T5ForTokenClassification"),
    ],
    "spans": [
        *("BertForQuestionAnswering", "RobertaForQuestionAnswering", "DistilBertForQuestionAnswering"),
        *("GPT2ForQuestionAnswering", "LlamaForQuestionAnswering", "T5ForQuestionAnswering"),
    ],
    "causal-lm": ["GPT2LMHeadModel", "LlamaForCausalLM", "BertLMHeadModel", "RobertaForCausalLM"],
    "seq2seq-lm": ["T5ForConditionalGeneration"],
    None: ["BertModel", "GPT2Model", "T5Model", "LlamaModel"],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KINDS.items() for name in names])
def test_kind_of_every_head(kind, name):
    kinds = {
        "Bert": "bert",
        "Roberta": "roberta",
        "DistilBert": "distilbert",
        "GPT2": "gpt2",
        "Llama": "llama",
        "T5": "t5",
    }
    config = HEADS[next(head for start, head in kinds.items() if name.startswith(start))].settings
    cls = getattr(transformers, name)
    with torch.device("meta"):
        assert kind_of(cls(cls.config_class(**config | {"num_labels": 2}))) == kind


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "gpt2", "llama"])
def test_one_label_or_a_problem_type_makes_it_regression(name):
    assert kind_of(HEADS[name].make(num_labels=1)) == "regression"
    assert kind_of(HEADS[name].make(problem_type="regression")) == "regression"
    assert kind_of(HEADS[name].make(num_labels=2)) == "classes"


def test_what_is_no_transformers_model_has_no_kind():
    assert kind_of(torch.nn.Linear(2, 2)) is None


def test_a_kind_of_head_that_is_none_of_ours_counts_its_labels():
    """A masked language model's loss is the mean over the masked tokens, not over the examples."""
    labels = torch.full((3, 7), IGNORED)
    labels[0, 1:5] = 4
    labels[2, 6] = 9
    assert counted({"input_ids": torch.zeros(3, 7), "labels": labels}, "") == 5
    assert counted({"input_ids": torch.zeros(3, 7), "labels": torch.zeros(3)}, "") == 3  # numbers: one each
