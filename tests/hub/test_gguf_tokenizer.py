import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf as tiny
import tokenizers as hf

from telamon.data.tokenizer import load_tokenizer
from telamon.errors import ConfigError, DataError
from telamon.hub.gguf_file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
REFERENCE = Path(__file__).parent.parent / "reference" / "vocabularies"
SPECIAL = ["<|end|>", "<|im_start|>"]
TEXTS = [
    "the cat sat  on the mat\n\n\tand 12345 mats, 3.5 naïve — 数学 ½ 👩‍👧",
    "<|im_start|>user\nthe cat<|end|>",
    "    def f(x):\n        return x ** 2   \n",
    " ",
    "",
    "don't DON'T they've",
]


def read(path: Path, metadata: dict[str, Any], arch: str = "llama") -> hf.Tokenizer:
    """The tokenizer of a file with these metadata."""
    path = tiny.write(path / "a.gguf", arch, tiny.sizes(arch) | {f"tokenizer.{key}": value for key, value in metadata.items()})
    with GgufFile(path) as source:
        return hf.Tokenizer.from_file(str(source.assets["tokenizer.json"]))


def trained(pre_tokenizer: Any) -> hf.Tokenizer:
    """A byte-level BPE of texts like those of the tests."""
    inner = hf.Tokenizer(hf.models.BPE())
    inner.pre_tokenizer = pre_tokenizer
    inner.decoder = hf.decoders.ByteLevel()
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    trainer = hf.trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(TEXTS * 3, trainer)
    return inner


def byte_level(inner: hf.Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """Metadata of a byte-level BPE, as converters write them."""
    layout = json.loads(inner.to_str())
    tokens = sorted(layout["model"]["vocab"], key=layout["model"]["vocab"].__getitem__)
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": [CONTROL if token in SPECIAL else NORMAL for token in tokens],
        "ggml.merges": [" ".join(merge) for merge in layout["model"]["merges"]],
        "ggml.eos_token_id": 0,
        "ggml.bos_token_id": 1,
    } | {f"ggml.{key}": value for key, value in more.items()}


# Built from the library's own parts, as the models' tokenizer.json are, where ours has patterns.
GPT2_LIKE = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
SMOLLM_LIKE = hf.pre_tokenizers.Sequence([hf.pre_tokenizers.Digits(individual_digits=True), GPT2_LIKE])


@pytest.mark.parametrize(("pre", "pre_tokenizer"), [("gpt-2", GPT2_LIKE), ("smollm", SMOLLM_LIKE)])
def test_a_byte_level_tokenizer_gives_the_ids_it_was_made_with(tmp_path: Path, pre: str, pre_tokenizer: Any):
    made = trained(pre_tokenizer)
    inner = read(tmp_path, byte_level(made, pre))
    for text in TEXTS:
        assert inner.encode(text).ids == made.encode(text).ids
        assert inner.decode(inner.encode(text).ids, skip_special_tokens=False) == text
    assert inner.encode(TEXTS[1]).ids[0] == 1 and inner.encode(TEXTS[1]).ids[-1] == 0


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "don't 12345  x!\n\n y", ["don", "'t", " 12345", " ", " x", "!", "\n\n", " y"]),
        ("smollm", "a 123 b½", ["a", " ", "1", "2", "3", " b", "½"]),
        ("llama-bpe", "I'LL 12345 go.\n\n  yes", ["I", "'LL", " ", "123", "45", " go", ".\n\n", " ", " yes"]),
        ("llama-bpe", "I'LLx", ["I", "'LL", "x"]),
        ("llama-bpe", "(x)\t数学", ["(x", ")", "\t数学"]),
        ("qwen2", "I'LL 123 go.\n\n  yes", ["I", "'LL", " ", "1", "2", "3", " go", ".\n\n", " ", " yes"]),
        ("default", "x=12345+y", ["x", "=", "123", "45", "+", "y"]),
    ],
)
def test_each_rule_cuts_text_into_its_words(tmp_path: Path, pre: str, text: str, words: list[str]):
    inner = read(tmp_path, byte_level(trained(GPT2_LIKE), pre))
    assert inner.pre_tokenizer is not None
    assert [text[start:end] for _, (start, end) in inner.pre_tokenizer.pre_tokenize_str(text)] == words


def test_qwen_composes_characters_first(tmp_path: Path):
    made = trained(GPT2_LIKE)
    apart, composed = "nai\u0308ve", "na\u00efve"
    qwen, gpt2 = read(tmp_path, byte_level(made, "qwen2")), read(tmp_path, byte_level(made, "gpt-2"))
    assert qwen.encode(apart).ids == qwen.encode(composed).ids
    assert gpt2.encode(apart).ids != gpt2.encode(composed).ids


def test_llama_3_takes_a_word_that_is_a_token_whole(tmp_path: Path):
    metadata = byte_level(trained(GPT2_LIKE), "llama-bpe")
    metadata["ggml.tokens"] = [*metadata["ggml.tokens"], "zyx"]  # no merges lead there
    metadata["ggml.token_type"] = [*metadata["ggml.token_type"], NORMAL]
    last = len(metadata["ggml.tokens"]) - 1
    assert read(tmp_path, metadata).encode("zyx", add_special_tokens=False).ids == [last]
    assert last not in read(tmp_path, metadata | {"ggml.pre": "gpt-2"}).encode("zyx").ids


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [1], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [0]),
        ({"pre": "llama-bpe"}, [1], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
    ],
)
def test_flags_say_what_is_put_around_a_text(tmp_path: Path, flags: dict[str, Any], before: list[int], after: list[int]):
    inner = read(tmp_path, byte_level(trained(GPT2_LIKE), **({"pre": "gpt-2"} | flags)))
    bare = inner.encode("the cat", add_special_tokens=False).ids
    assert inner.encode("the cat").ids == [*before, *bare, *after]


def spm_like(*, prefix: bool) -> tuple[hf.Tokenizer, dict[str, Any]]:
    """A tokenizer of SentencePiece's kind, and the metadata of one: scores in place of merges."""
    special = ["<unk>", "<s>", "</s>"]
    made = hf.Tokenizer(hf.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    mark = hf.normalizers.Replace(" ", "▁")
    made.normalizer = hf.normalizers.Sequence([hf.normalizers.Prepend("▁"), mark]) if prefix else mark
    tokens = [*special, *(f"<0x{b:02X}>" for b in range(256))]
    made.train_from_iterator(
        ["the cat sat on the mat and then the dog sat down"] * 2,
        hf.trainers.BpeTrainer(vocab_size=330, special_tokens=tokens, show_progress=False),
    )
    layout = json.loads(made.to_str())
    layout["added_tokens"] = [token for token in layout["added_tokens"] if token["content"] in special]
    made = hf.Tokenizer.from_str(json.dumps(layout))
    vocab = layout["model"]["vocab"]
    pieces = sorted(vocab, key=vocab.__getitem__)
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(pieces) - 259)
    metadata = {
        "ggml.model": "llama",
        "ggml.tokens": pieces,
        "ggml.token_type": kinds,
        "ggml.scores": [-float(max(i - 258, 0)) for i in range(len(pieces))],
        "ggml.unknown_token_id": 0,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.add_space_prefix": prefix,
    }
    return made, metadata


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_gives_the_ids_it_was_made_with(tmp_path: Path, prefix: bool):
    made, metadata = spm_like(prefix=prefix)
    inner = read(tmp_path, metadata)
    for text in ["the cat sat on the mat", "then  the 数 dog\n", "Zebra", "<s>the dog</s>", " on"]:
        ids = inner.encode(text, add_special_tokens=False).ids
        assert ids == made.encode(text).ids
        assert "<s>" in text or inner.decode(ids) == text
    assert inner.encode("the dog").ids == [1, *made.encode("the dog").ids]  # texts begin with BOS unless the file says otherwise
    assert 3 + 0xE6 in inner.encode("数").ids  # a byte of it


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_ids_are_those_of_sentencepiece_itself(tmp_path: Path, name: str):
    known = json.loads((REFERENCE / f"{name}.json").read_text(encoding="utf-8"))
    inner = read(tmp_path, {key.removeprefix("tokenizer."): value for key, value in known["metadata"].items()})
    inner.encode_special_tokens = True  # sentencepiece takes a spelt control token for plain text
    for text in known["texts"]:
        assert inner.encode(text["text"], add_special_tokens=False).ids == text["ids"], text
        assert inner.decode(text["ids"]) == text["decoded"], text


def test_pieces_are_joined_by_score_not_by_id(tmp_path: Path):
    """Of "ab" and "bc" in "abc", the better score wins, whichever comes first in the vocabulary."""
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "bc"]
    metadata = {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [NORMAL] * 5,
        "ggml.unknown_token_id": 0,
        "ggml.bos_token_id": 1,
        "ggml.add_space_prefix": False,
        "ggml.add_bos_token": False,
    }
    for scores, expected in [([-1.0, -2.0], ["ab", "c"]), ([-2.0, -1.0], ["a", "bc"])]:
        inner = read(tmp_path, metadata | {"ggml.scores": [0.0] * 3 + [-9.0] * 3 + scores})
        assert inner.encode("abc").tokens == expected
        assert inner.encode("axyb").tokens == ["a", "<unk>", "b"]  # no bytes to fall back on


def test_no_text_is_joined_to_a_control_token(tmp_path: Path):
    _, metadata = spm_like(prefix=False)
    metadata["ggml.tokens"] = [*metadata["ggml.tokens"], "<", "s>", ">"]
    metadata["ggml.token_type"] = [*metadata["ggml.token_type"], NORMAL, NORMAL, NORMAL]
    metadata["ggml.scores"] = [*metadata["ggml.scores"], -900.0, -901.0, -902.0]
    inner = read(tmp_path, metadata)
    inner.encode_special_tokens = True  # a text that only spells one, as a document may
    assert inner.encode("<s>", add_special_tokens=False).tokens == ["<", "s>"]


def test_tokens_that_a_models_makers_added_are_found_first(tmp_path: Path):
    _, metadata = spm_like(prefix=False)
    count = len(metadata["ggml.tokens"])
    metadata["ggml.tokens"] = [*metadata["ggml.tokens"], "  ", "<tool>", "[PAD]"]  # Gemma has tokens of spaces
    metadata["ggml.token_type"] = [*metadata["ggml.token_type"], USER_DEFINED, USER_DEFINED, UNUSED]
    metadata["ggml.scores"] = [*metadata["ggml.scores"], -1000.0, -1000.0, -1000.0]
    inner = read(tmp_path, metadata)
    ids = inner.encode("on  the<tool>cat[PAD]").ids
    assert count in ids and count + 1 in ids and count + 2 not in ids
    assert inner.decode(ids) == "on  the<tool>cat[PAD]"
    added = inner.get_added_tokens_decoder()
    assert [added[i].special for i in (0, 1, 2, count, count + 1)] == [True, True, True, False, False]


def test_what_goes_with_a_tokenizer_is_written_beside_it(tmp_path: Path):
    metadata = byte_level(trained(GPT2_LIKE), "gpt-2", padding_token_id=0, eot_token_id=1, fim_pre_token_id=4)
    template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %} é"
    metadata |= {"chat_template": template, "chat_template.tool_use": "other"}
    path = tiny.write(tmp_path / "a.gguf", "llama", tiny.sizes("llama") | {f"tokenizer.{k}": v for k, v in metadata.items()})
    with GgufFile(path) as source:
        assert set(source.assets) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
        texts = {name: file.read_text(encoding="utf-8") for name, file in source.assets.items()}
        tokenizer = load_tokenizer(str(source.assets["tokenizer.json"].parent))
        assert (source.config["bos_token_id"], source.config["eos_token_id"]) == (1, 0)
    assert texts["chat_template.jinja"] == template
    assert json.loads(texts["generation_config.json"]) == {"bos_token_id": 1, "eos_token_id": [0, 1], "pad_token_id": 0}
    assert json.loads(texts["tokenizer_config.json"]) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 64,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|end|>",
        "unk_token": None,
        "pad_token": "<|end|>",
        "add_bos_token": False,
        "add_eos_token": False,
    }
    # The file adds no BOS to texts: documents begin without, and only the template writes it.
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 0) and tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def changed(metadata: dict[str, Any], **changes: Any) -> dict[str, Any]:
    merged = metadata | {f"ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in merged.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "t5"}, ConfigError, "tokenizer.ggml.model is 't5'; tokenizers that can be read: gpt2, llama"),
        ({"pre": "tekken"}, ConfigError, "tokenizer.ggml.pre, .* is 'tekken'; rules that are known: gpt-2, default, smollm, llama-bpe"),
        ({"pre": None}, ConfigError, "tokenizer.ggml.pre, .* is missing"),
        ({"tokens": None}, ConfigError, "has no tokenizer.ggml.tokens"),
        ({"merges": None}, ConfigError, "has no tokenizer.ggml.merges"),
        ({"merges": ["q zz"]}, DataError, "tokenizer.ggml.merges does not fit"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, DataError, "tokenizer.ggml.tokens has 'a' twice"),
        ({"token_type": [1, 1]}, DataError, "tokenizer.ggml.token_type has 2 entries for"),
        ({"eos_token_id": 4000}, DataError, "tokenizer.ggml.eos_token_id is 4000, and there are"),
        ({"bos_token_id": None, "add_bos_token": True}, DataError, "add_bos_token is true, and there is no tokenizer.ggml.bos_token_id"),
        ({"add_space_prefix": True}, ConfigError, "tokenizer.ggml.add_space_prefix is True"),
        ({"add_sep_token": True}, ConfigError, "tokenizer.ggml.add_sep_token is True"),
        ({"normalizer.lowercase": True}, ConfigError, "does not know: tokenizer.ggml.normalizer.lowercase=True"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        read(tmp_path, changed(byte_level(trained(GPT2_LIKE), "gpt-2"), **changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scores": None}, ConfigError, "has no tokenizer.ggml.scores"),
        ({"scores": [0.0]}, DataError, "tokenizer.ggml.scores has 1 entries for"),
        ({"pre": "llama-bpe"}, ConfigError, "tokenizer.ggml.pre is 'llama-bpe'"),
        ({"remove_extra_whitespaces": True}, ConfigError, "tokenizer.ggml.remove_extra_whitespaces is True"),
        ({"precompiled_charsmap": [1, 2]}, ConfigError, "tokenizer.ggml.precompiled_charsmap"),
    ],
)
def test_a_sentencepiece_vocabulary_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        read(tmp_path, changed(spm_like(prefix=True)[1], **changes))


def test_empty_tokens_get_a_name(tmp_path: Path):
    metadata = byte_level(trained(GPT2_LIKE), "gpt-2")
    metadata["ggml.tokens"] = [*metadata["ggml.tokens"], "", ""]
    metadata["ggml.token_type"] = [*metadata["ggml.token_type"], UNUSED, UNUSED]
    last = len(metadata["ggml.tokens"]) - 1
    assert read(tmp_path, metadata).id_to_token(last) == f"[EMPTY_{last}]"


def test_the_rows_of_the_embedding_say_how_large_the_vocabulary_is(tmp_path: Path):
    metadata = {f"tokenizer.{k}": v for k, v in byte_level(trained(GPT2_LIKE), "gpt-2").items()}
    rows = {"token_embd.weight": np.zeros((7, tiny.D), np.float32)}
    with GgufFile(tiny.write(tmp_path / "a.gguf", "llama", tiny.sizes("llama") | metadata, rows)) as source:
        assert source.config["vocab_size"] == 7
