import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from telamon.data.tokenizer import TextTokenizer, train_bpe
from telamon.data.words import WordMemo

SAMPLE = (
    "def total(self, values):\n    '''It's the sum.'''\n    return sum(values)  # we'll see: 12345 numbers\n\n\nclass Größe:\n\tpass\r\n"
)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_bpe([SAMPLE * 3, "naïve café 数学 и другое"], vocab_size=400)


def check(tokenizer: TextTokenizer, texts: list[str]) -> None:
    ids, counts = WordMemo(tokenizer.encode_batch).encode_flat(texts)
    expected = tokenizer.encode_batch(texts)
    assert counts.tolist() == [len(e) for e in expected]
    assert ids.tolist() == [i for each in expected for i in each]


# Where words begin and end is decided by white space, apostrophes, digits and what is not ASCII: draw mostly these.
tricky = st.text(alphabet=st.one_of(st.sampled_from(" \n\t\r\x0b\x0c\x1c\x1f\x85\xa0\u3000'sdl9_.aB²é数"), st.characters()), max_size=40)


@given(st.lists(tricky, max_size=4))
@settings(max_examples=200)
@example(["é \n\n b", "a.\x1cb\x1f c\x1d\x1e"])
def test_words_have_the_ids_of_the_whole_text(texts: list[str]):
    # Trained on the texts themselves, each of their words is one token: a word cut elsewhere has other ids.
    check(train_bpe(texts, vocab_size=2000), texts)


def test_real_source_has_the_ids_of_the_whole_text(tokenizer: TextTokenizer):
    with open(np.__file__, encoding="utf-8") as file:
        source = file.read()
    check(tokenizer, [source, source + "\n# naïve\n\n  " + source, "", "<|eos|> is text"])


def test_what_was_forgotten_is_encoded_again(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("telamon.data.words._MOST_WORDS", 3)
    memo = WordMemo(tokenizer.encode_batch)
    for text in ("one two three four", "four five one", "one two"):
        assert memo.encode_flat([text])[0].tolist() == tokenizer.encode(text)
