import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf
from hypothesis import given
from hypothesis import strategies as st

from telamon.data.tokenizer import IdTokenizer, TextTokenizer, declared_specials, load_tokenizer, train_bpe
from telamon.errors import ConfigError, DataError

TEXT = "the cat sat on the mat, the dog ate naïve 数学 and the rest of it"


@pytest.fixture(scope="module")
def bpe() -> TextTokenizer:
    return train_bpe([TEXT] * 3, vocab_size=300)


@given(st.text())
def test_any_text_comes_back_from_its_ids(bpe: TextTokenizer, text: str):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert int(bpe.token_bytes[ids].sum()) == len(text.encode())


def test_special_tokens_come_first_and_stand_for_no_bytes(bpe: TextTokenizer):
    assert (bpe.bos_id, bpe.eos_id, bpe.name(2)) == (0, 1, "<|pad|>")
    assert bpe.token_bytes[:3].tolist() == [0, 0, 0] and bpe.token_bytes[3:].min() == 1
    assert bpe.token_bytes.dtype == np.int32 and len(bpe.token_bytes) == bpe.vocab_size <= 300


def test_text_that_spells_a_special_token_is_only_text(bpe: TextTokenizer):
    ids = bpe.encode("a<|eos|>b")
    assert 1 not in ids and bpe.decode(ids) == "a<|eos|>b"
    assert bpe.encode_batch(["a<|eos|>b"]) == [ids] and bpe.encode_flat(["a<|eos|>b"])[0].tolist() == ids


def test_training_is_the_same_in_every_process():
    program = f"from telamon.data.tokenizer import train_bpe; print(train_bpe([{TEXT!r}] * 3, vocab_size=300).hash)"
    hashes = {subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout for _ in range(3)}
    assert len(hashes) == 1


def sentencepiece_like(folder: Path) -> hf.Tokenizer:
    """A tokenizer in the manner of Llama 2: a mark for spaces, bytes for what is not in the vocabulary, BOS added by a template."""
    special = ["<unk>", "<s>", "</s>"]
    inner = hf.Tokenizer(hf.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = hf.normalizers.Sequence([hf.normalizers.Prepend("▁"), hf.normalizers.Replace(" ", "▁")])
    trainer = hf.trainers.BpeTrainer(vocab_size=330, special_tokens=[*special, *(f"<0x{b:02X}>" for b in range(256))], show_progress=False)
    inner.train_from_iterator(["the cat sat on the mat the dog"], trainer)
    layout = json.loads(inner.to_str())
    layout["added_tokens"] = [token for token in layout["added_tokens"] if token["content"] in special]
    inner = hf.Tokenizer.from_str(json.dumps(layout))
    inner.decoder = hf.decoders.Sequence(
        [hf.decoders.Replace("▁", " "), hf.decoders.ByteFallback(), hf.decoders.Fuse(), hf.decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = hf.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.enable_truncation(4)
    inner.enable_padding(length=4)
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    return inner


def test_a_sentencepiece_tokenizer_counts_its_bytes(tmp_path: Path):
    sentencepiece_like(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    text = "the cat sat on the 数 mat"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert int(tokenizer.token_bytes[ids].sum()) == len(text.encode()) + 1  # the space it puts before the text
    assert tokenizer.encode_flat([text, "cat"])[0].tolist() == ids + tokenizer.encode("cat")


def test_specials_are_those_that_the_folder_declares(tmp_path: Path, bpe: TextTokenizer):
    bpe.save(tmp_path / "tokenizer.json")
    config = {"bos_token": None, "eos_token": {"content": "<|pad|>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 2)
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).hash == tokenizer.hash != bpe.hash


def test_a_folder_can_say_that_documents_begin_without_bos(tmp_path: Path, bpe: TextTokenizer):
    """As of models that know their BOS from chats alone."""
    bpe.export(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    for says, bos in ((True, 0), (False, None)):
        file.write_text(json.dumps({**json.loads(file.read_text()), "add_bos_token": says}))
        assert load_tokenizer(str(tmp_path)).bos_id == bos
    assert declared_specials(tmp_path)["bos_token"] == "<|bos|>"


@pytest.mark.parametrize(("adds", "bos"), [("<|bos|> $A", 0), ("<|bos|> $A <|eos|>", 0), ("$A <|bos|>", None), (None, None)])
def test_a_tokenizer_of_transformers_begins_documents_as_it_begins_texts(
    tmp_path: Path, bpe: TextTokenizer, adds: str | None, bos: int | None
):
    inner = hf.Tokenizer.from_str(bpe.to_json())
    if adds:
        inner.post_processor = hf.processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=adds, special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
        )
    inner.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(str(tmp_path)).bos_id == bos
    # One that training wrote says nothing, and training begins its documents with BOS.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|bos|>", "eos_token": "<|eos|>"}))
    assert load_tokenizer(str(tmp_path)).bos_id == 0


@pytest.mark.parametrize(
    ("content", "config", "message"),
    [
        (None, None, r"no tokenizer.json there"),
        ("{}", None, r"tokenizer.json: not a tokenizer file"),
        ("bare", None, r"no token ends a document; name it as eos_token in a tokenizer_config.json"),
        ("bare", '{"eos_token": "<end>"}', r"the eos_token '<end>' is not in its vocabulary"),
        ("bare", "{", r"tokenizer_config.json: not valid JSON"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None, config: str | None, message: str):
    if content == "bare":
        hf.Tokenizer(hf.models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    elif content:
        (tmp_path / "tokenizer.json").write_text(content)
    if config:
        (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(tmp_path))


def test_ids_are_written_in_decimal():
    tokenizer = IdTokenizer(20)
    assert tokenizer.encode("3 14 15") == [3, 14, 15] and tokenizer.decode([3, 14]) == "3 14"
    assert not tokenizer.token_bytes.any()
    for text in ("20", "-1", "word"):
        with pytest.raises(DataError, match="ids from 0 to 19"):
            tokenizer.encode(text)
