import numpy as np
import pytest

from telamon.data.loader import open_loader
from telamon.errors import ConfigError, DataError

FIELDS = {"tokens": "int32", "targets": "int32", "mask": "float32", "segments": "int32", "positions": "int32"}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in FIELDS)


def lines(count: int, words) -> str:
    return "".join('{"text": "' + " ".join(f"w{i}" for _ in range(words(i))) + '"}\n' for i in range(count))


@pytest.fixture
def loader_of(make_config):
    return lambda *, data, train=None, **more: open_loader(make_config(data=data, train=train), **more)


def test_a_batch_has_the_promised_arrays(loader_of, text_folder):
    loader = loader_of(data={"sources": [{"kind": "text", "path": str(text_folder)}]})
    batch = loader.batch_at(0)
    assert {name: str(array.dtype) for name, array in batch.items()} == FIELDS
    assert all(array.shape == (4, 16) for array in batch.values())
    assert batch["tokens"].max() < loader.tokenizer.vocab_size


@pytest.mark.parametrize("packing", ["split", "first_fit", "best_fit", "drop_tail"])
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_global_batch_of_one(loader_of, text_folder, packing: str, processes: int):
    data = {
        "sources": [{"kind": "text", "path": str(text_folder), "weight": 3}, {"kind": "synthetic", "documents": 9, "length": 20}],
        "packing": packing,
    }
    whole = loader_of(data=data)
    parts = [loader_of(data=data, process_index=i, process_count=processes) for i in range(processes)]
    for step in (0, 5, 40):
        blocks = [part.batch_at(step) for part in parts]
        assert same(whole.batch_at(step), {name: np.concatenate([b[name] for b in blocks]) for name in FIELDS})
    evals = [list(part.eval_batches(8)) for part in parts]
    assert len({len(e) for e in evals}) == 1
    for index, batch in enumerate(whole.eval_batches(8)):
        assert same(batch, {name: np.concatenate([e[index][name] for e in evals]) for name in FIELDS})


def test_any_number_of_stops_gives_the_same_documents(loader_of):
    # 100 documents, one a row, 50 steps of 5 rows: two and a half epochs.
    config = dict(
        data={"sources": [{"kind": "synthetic", "documents": 100, "length": 2}], "val_fraction": 0.0},
        train={"batch_size": 5, "seq_len": 2, "steps": 50},
    )
    whole = [b["tokens"] for b in loader_of(**config).batches(0, 50)]
    assert len(whole) == 50
    assert stopped(lambda: loader_of(**config), stops=(7, 8, 23), steps=50) == np.concatenate(whole).tolist()


def test_stops_inside_a_document_lose_and_repeat_no_token(loader_of):
    config = dict(
        data={"sources": [{"kind": "synthetic", "documents": 100, "length": 21}], "val_fraction": 0.0},
        train={"batch_size": 5, "seq_len": 16, "steps": 50},
    )
    loader = loader_of(**config)
    whole = [b["tokens"] for b in loader.batches(0, 50)]
    assert loader.batch_at(6)["mask"][:, -1].any(), "a document of step 6 goes on in a later step"
    assert stopped(lambda: loader_of(**config), stops=(7, 8, 23), steps=50) == np.concatenate(whole).tolist()


def stopped(open_again, *, stops: tuple[int, ...], steps: int) -> list[list[int]]:
    """Rows of a run that is stopped after these steps, and each time opened again from the saved position."""
    rows: list[list[int]] = []
    position = None
    for stop in (*stops, steps):
        loader = open_again()
        if position is not None:
            loader.restore(position)
        start = 0 if position is None else position["step"]
        for batch in loader.batches(start, steps):
            rows.extend(batch["tokens"].tolist())
            if loader.position()["step"] == stop:
                break
        position = loader.position()
    return rows


def test_each_epoch_is_a_permutation_and_a_resume_reproduces_it(loader_of, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "{chr(97 + i)}"}}\n' for i in range(20)))

    def documents(steps: range, **data) -> list[str]:
        source = {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}
        loader = loader_of(data={"sources": [source], "val_fraction": 0.0, **data}, train={"seq_len": 3, "batch_size": 10})
        return [loader.tokenizer.decode(row) for step in steps for row in loader.batch_at(step)["tokens"]]

    alphabet = [chr(97 + i) for i in range(20)]
    ten = documents(range(20), epochs=10)
    epochs = [ten[20 * e : 20 * (e + 1)] for e in range(10)]
    assert all(sorted(epoch) == alphabet for epoch in epochs)
    assert epochs[0] == documents(range(2), epochs=1)
    assert len({tuple(epoch) for epoch in epochs}) == 10
    assert documents(range(4, 6)) == epochs[2]
    assert documents(range(2), shuffle=False) == alphabet


def test_the_batch_ramp_counts_rows(loader_of):
    ramp = [{"step": 10, "batch_size": 4}, {"step": 20, "batch_size": 8}]
    data = {"sources": [{"kind": "synthetic", "documents": 300, "length": 30}], "shuffle": False}
    ramped = loader_of(data=data, train={"batch_size": 2, "batch_ramp": ramp})
    one_by_one = loader_of(data=data, train={"batch_size": 1})
    assert ramped.batch_at(15)["tokens"].tolist() == [one_by_one.batch_at(40 + i)["tokens"][0].tolist() for i in range(4)]
    assert [len(b["tokens"]) for b in ramped.batches(9, 21)] == [2] + [4] * 10 + [8]


def test_out_of_data_is_an_error_with_figures(loader_of):
    loader = loader_of(
        data={"sources": [{"kind": "synthetic", "documents": 10, "length": 2}], "epochs": 1, "val_fraction": 0.0}, train={"seq_len": 2}
    )
    rows = [loader.batch_at(step)["segments"].max(axis=1).tolist() for step in range(3)]
    assert rows == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]
    with pytest.raises(DataError, match=r"out of data at step 3: data.epochs=1 gives 10 rows"):
        loader.batch_at(3)


def test_processes_share_the_last_rows_of_the_data(loader_of):
    # Every other row is of the short source, so that the data end with its tenth row, the nineteenth of the mixture, and one more of the other.
    sources = [{"kind": "synthetic", "documents": count, "length": 2} for count in (10, 100)]
    config = dict(data={"sources": sources, "epochs": 1, "val_fraction": 0.0}, train={"seq_len": 2, "batch_size": 8})
    whole = loader_of(**config).batch_at(2)
    blocks = [loader_of(**config, process_index=i, process_count=2).batch_at(2) for i in range(2)]
    assert [block["segments"].max(axis=1).tolist() for block in blocks] == [[1, 1, 1, 1], [0, 0, 0, 0]]
    assert same(whole, {name: np.concatenate([b[name] for b in blocks]) for name in FIELDS})


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("train", "seq_len", 32, r"train.seq_len was 16 when the checkpoint was written and is 32 now"),
        ("train", "seed", 1, r"train.seed was 0 .* is 1 now"),
        ("train", "batch_size", 8, r"gives 40 rows in the first 5 steps, but the run had taken 20"),
        ("data", "packing", "first_fit", r"data.packing was split .* first_fit now"),
        ("data", "val_fraction", 0.5, r"data_hash was [0-9a-f]{64} "),
    ],
)
def test_going_on_with_other_data_is_refused(loader_of, text_folder, section: str, field: str, value, message: str):
    sections = {"data": {"sources": [{"kind": "text", "path": str(text_folder)}]}, "train": {}}
    position = loader_of(**sections).position(5)
    sections[section] = {**sections[section], field: value}
    with pytest.raises(ConfigError, match=message):
        loader_of(**sections).restore(position)


def test_evaluation_sees_each_held_out_byte_once(loader_of, text_folder):
    loader = loader_of(data={"sources": [{"kind": "text", "path": str(text_folder)}], "val_fraction": 0.3})
    batches = list(loader.eval_batches(4))
    trained = np.concatenate([b["targets"][b["mask"] > 0] for b in batches])
    assert int(loader.tokenizer.token_bytes[trained].sum()) == loader.held_out_bytes > 0
    assert sum(int((b["segments"] > 0).sum()) for b in batches) == loader.report()["sources"][0]["held_out_tokens"]


def test_a_batch_that_processes_cannot_share_is_refused(loader_of):
    with pytest.raises(ConfigError, match=r"train.batch_size=4 is not divisible by the 3 processes"):
        loader_of(data={"sources": [{"kind": "synthetic"}]}, process_count=3)
