"""Turns, commands and limits of a conversation, with a scripted engine in the model's place."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from telamon.data.chat import ChatEncoder
from telamon.data.chat_template import DEFAULT, ChatTemplate, read_template
from telamon.data.tokenizer import IdTokenizer, load_tokenizer
from telamon.errors import ConfigError, DataError
from telamon.infer.chat import Chat, chat_with, converse
from telamon.infer.sampling import Sampling

HERE = Path(__file__).parent.parent / "reference" / "chat"
GREEDY = Sampling(temperature=0)


class Parrot:
    """An engine whose answers are given beforehand, drawn two tokens at a time; it keeps its prompts."""

    def __init__(self, tokenizer, *answers):
        self.tokenizer, self.answers = tokenizer, list(answers)
        self.prompts: list[str] = []

    def start(self, prompts, *, max_tokens, sampling, seed):
        (prompt,) = prompts
        self.prompts.append(self.tokenizer._inner.decode(prompt, skip_special_tokens=False))
        answer = self.answers.pop(0)
        self.ids = self.tokenizer.encode(answer)[:max_tokens] if isinstance(answer, str) else []
        self.error, self.most = (None if isinstance(answer, str) else answer), max_tokens
        self.tokens: list[list[int]] = [[]]
        self.finish: list[str | None] = [None]
        return self

    @property
    def running(self):
        return self.finish[0] is None

    def advance(self):
        if self.error and self.tokens[0]:
            raise self.error
        self.tokens[0] += self.tokenizer.encode("half") if self.error else self.ids[len(self.tokens[0]) :][:2]
        if len(self.tokens[0]) == len(self.ids) and not self.error:
            self.finish[0] = "length" if len(self.ids) == self.most else "eos"


@pytest.fixture(scope="module")
def encoder():
    folder = HERE / "tokenizers" / "chatml"
    return ChatEncoder(load_tokenizer(str(folder)), read_template(HERE / "templates" / "chatml.jinja", beside=folder))


@pytest.fixture
def chat(encoder):
    """A function of answers that gives a chat and its engine."""

    def make(*answers, **changes):
        engine: Any = Parrot(encoder.tokenizer, *answers)
        return Chat(engine, encoder, **{"context": 500, "max_tokens": 50, "sampling": GREEDY, **changes}), engine

    return make


def talk(chat, *lines, forgiving=False):
    """What is written, and what is noted."""
    written, noted = [], []
    left = iter(lines)
    converse(chat, read=lambda: next(left, None), write=written.append, note=noted.append, forgiving=forgiving)
    return "".join(written), noted


def test_every_turn_sees_those_before_it(chat):
    made, engine = chat("hello", "the cat")
    assert talk(made, "hi", "", "and?") == ("hello\nthe cat\n", [])
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    first = system + "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert engine.prompts == [first, first + "hello<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"]


def test_reset_forgets_all_but_the_system_and_quit_ends(chat):
    made, engine = chat("a", "b", "c", system="Say ok.")
    assert talk(made, "one", " /reset ", "two", "/quit", "three") == ("a\nb\n", ["a new conversation"])
    assert engine.prompts[1] == "<|im_start|>system\nSay ok.<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"


def test_a_command_that_is_none_is_not_said_to_the_model(chat):
    """To people; in a pipe each line is a message. A path is one to both."""
    made, engine = chat("a", "b")
    written, noted = talk(made, "/help", "/etc/hosts", forgiving=True)
    assert written == "a\n" and noted == ["there is no /help; /reset begins a new conversation, /quit ends"]
    assert talk(made, "/help")[0] == "b\n" and len(engine.prompts) == 2


def test_an_answer_has_at_most_so_many_tokens_and_what_the_context_leaves(chat, encoder):
    made, _ = chat("the cat sat on the mat", max_tokens=3)
    assert talk(made, "hi")[1] == ["(cut off after 3 tokens)"]
    size = len(encoder.prompt([{"role": "user", "content": "hi"}]))
    made, _ = chat("the cat sat on the mat", context=size + 2)
    assert talk(made, "hi")[1] == ["(cut off after 2 tokens)"]


def test_a_full_context_is_said_and_the_conversation_stays_as_it_was(chat, encoder):
    size = len(encoder.prompt([{"role": "user", "content": "hi"}]))
    made, _ = chat("ok", "ok", context=size + 6)
    with pytest.raises(ConfigError, match=rf"has \d+ tokens with this message.*trained on {size + 6} at a time.*/reset"):
        talk(made, "hi", "hi")
    made, _ = chat("ok", "ok", context=size + 6)
    written, noted = talk(made, "hi", "hi", "/reset", "hi", forgiving=True)
    assert written == "ok\nok\n" and len(noted) == 2 and "/reset" in noted[0]


def test_a_conversation_that_the_template_refuses_is_an_error_in_a_pipe_and_a_note_to_people(encoder):
    source = "{{ raise_exception('no system here') if messages[0].role == 'system' else 'x' }}"
    refusing = ChatEncoder(encoder.tokenizer, ChatTemplate({DEFAULT: source}, {}, "the template"))
    engine: Any = Parrot(encoder.tokenizer, "ok")
    made = Chat(engine, refusing, context=100, max_tokens=5, sampling=GREEDY, system="s")
    with pytest.raises(DataError, match="no system here"):
        talk(made, "hi")
    assert talk(made, "hi", forgiving=True) == ("", ["the template cannot render this conversation: no system here"])


def test_what_was_shown_of_an_answer_stays_when_it_is_cut_off(chat):
    made, engine = chat(KeyboardInterrupt(), "ok")
    assert talk(made, "hi", "go on", forgiving=True) == ("half\nok\n", [])
    assert "half<|im_end|>\n<|im_start|>user\ngo on" in engine.prompts[1]


def test_no_tokens_are_not_an_answer(chat):
    with pytest.raises(ConfigError, match="max_tokens=0"):
        chat(max_tokens=0)


def opened(encoder, template, tokenizer=None):
    asked = []
    run = SimpleNamespace(
        folder="runs/one",
        tokenizer=tokenizer or encoder.tokenizer,
        template=template,
        context=64,
        generator=lambda also_ends: asked.append(set(also_ends)),
    )
    return run, asked


def test_a_turn_ends_where_the_template_ends_it(encoder):
    run, asked = opened(encoder, encoder.template)
    chat_with(run, max_tokens=5, sampling=GREEDY)  # pyright: ignore[reportArgumentType]
    assert asked == [{encoder.tokenizer.eos_id}]
    run, asked = opened(encoder, ChatTemplate({DEFAULT: "{% for m in messages %}{{ m.content }}{% endfor %}"}, {}, "x"))
    chat_with(run, max_tokens=5, sampling=GREEDY)  # pyright: ignore[reportArgumentType]
    assert asked == [set()]


def test_a_run_without_a_template_or_text_is_refused(encoder):
    for run, message in (
        (opened(encoder, None)[0], r"runs/one has no chat template.*--template FILE"),
        (opened(encoder, None, IdTokenizer(20))[0], "never text"),
    ):
        with pytest.raises(ConfigError, match=message):
            chat_with(run, max_tokens=5, sampling=GREEDY)  # pyright: ignore[reportArgumentType]
