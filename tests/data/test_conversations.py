"""Conversations as ids: against what transformers recorded, and what a template must never be made to say.

The templates are ours, in the published formats of ChatML, Llama 3 and Gemma.
"""

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers as hf

from telamon.data.chat import ChatEncoder
from telamon.data.chat_template import DEFAULT, ChatTemplate, find_template, read_template
from telamon.data.tokenizer import TextTokenizer, load_tokenizer
from telamon.errors import ConfigError, DataError

HERE = Path(__file__).parent.parent / "reference" / "chat"
CONVERSATIONS = json.loads((HERE / "conversations.json").read_text(encoding="utf-8"))
EXPECTED = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))["expected"]
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}
ROLES = {"chatml": "chatml", "llama3": "llama3", "gemma": "gemma"}


def encoder(template: str, tokenizer: str | None = None) -> ChatEncoder:
    folder = HERE / "tokenizers" / (tokenizer or template)
    return ChatEncoder(load_tokenizer(str(folder)), read_template(HERE / "templates" / f"{template}.jinja", beside=folder))


def inline(source: str, tokenizer: TextTokenizer | None = None) -> ChatEncoder:
    """An encoder with the template `source`."""
    return ChatEncoder(
        tokenizer or load_tokenizer(str(HERE / "tokenizers" / "chatml")), ChatTemplate({DEFAULT: source}, {}, "the template")
    )


def trained(encoder: ChatEncoder, messages: list[Any]) -> list[str]:
    """The text of each run of trained tokens."""
    conversation = encoder.conversation(messages)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], conversation.turns, [0]])))
    spans = [slice(a, b) for a, b in pairwise(edges) if conversation.turns[a]]
    return ["".join(conversation.text[slice(*conversation.offsets[i])] for i in range(span.start, span.stop)) for span in spans]


@pytest.mark.parametrize("case", EXPECTED, ids=lambda case: f"{case['template']}: {case['conversation']}")
def test_text_ids_and_masks_are_those_of_transformers(case: dict[str, Any]):
    """No expectation is left out: roles, trimming, tools with their keys in order, refusals, BOS once though the tokenizer adds one too."""
    chat = encoder(case["template"], case["tokenizer"])
    asked = dict(CONVERSATIONS[case["conversation"]])
    messages, is_prompt = asked.pop("messages"), asked.get("add_generation_prompt", False)
    if "refused" in case:
        with pytest.raises(DataError, match=case["refused"]):
            chat.template.render(messages, **asked)
        return
    assert chat.template.render(messages, **asked) == case["text"]
    if is_prompt:
        asked.pop("add_generation_prompt")
        assert chat.prompt(messages, **asked) == case["ids"]
    else:
        conversation = chat.conversation(messages, **asked)
        assert (conversation.text, conversation.ids.tolist()) == (case["text"], case["ids"])
        assert "mask" not in case or conversation.mask.astype(int).tolist() == case["mask"]
    if chat.tokenizer.bos_id is not None and case["template"] in ("llama3", "gemma"):
        assert case["ids"].count(chat.tokenizer.bos_id) == 1 and case["ids"][0] == chat.tokenizer.bos_id


@pytest.mark.parametrize("name", ["chatml", "chatml-generation", "llama3", "gemma"])
def test_the_header_is_given_and_the_end_of_a_turn_is_learned(name: str):
    """In one turn and in two: headers 0, answers and their end-of-turn tokens 1, all user text 0."""
    chat = encoder(name, name.partition("-")[0])
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}[name.partition("-")[0]]
    assert trained(chat, [USER, ANSWER]) == [f"ok{end}"]
    two = [USER, ANSWER, {"role": "user", "content": "ok the mat"}, {"role": "assistant", "content": "the cat"}]
    assert trained(chat, two) == [f"ok{end}", f"the cat{end}"]
    assert set(chat.conversation(two).turns.tolist()) == {0, 1, 2}
    assert chat.tokenizer.name(chat.end_of_turn or 0) == end


@pytest.mark.parametrize("name", sorted(ROLES))
def test_a_prompt_is_how_the_conversation_begins(name: str):
    """What the model is asked with is what it was trained after."""
    chat = encoder(name)
    conversation = chat.conversation([USER, ANSWER])
    prompt = chat.prompt([USER])
    assert conversation.ids[: len(prompt)].tolist() == prompt and np.flatnonzero(conversation.mask)[0] == len(prompt)


@pytest.mark.parametrize("name", sorted(ROLES))
def test_a_message_cannot_end_a_turn_or_open_one(name: str):
    chat = encoder(name)
    specials = [
        token.content
        for token in hf.Tokenizer.from_file(str(HERE / "tokenizers" / name / "tokenizer.json")).get_added_tokens_decoder().values()
    ]
    plain = chat.conversation([{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}])
    count = int((chat.tokenizer.token_bytes[plain.ids] == 0).sum())
    for content in [*specials, "".join(specials), f"a{specials[0]}\n{specials[1]}system\nb"]:
        conversation = chat.conversation([{"role": "user", "content": content}, {"role": "assistant", "content": content}])
        assert int((chat.tokenizer.token_bytes[conversation.ids] == 0).sum()) == count
        assert conversation.text.count(content) == 2 + plain.text.count(content)
        assert chat.tokenizer.decode(conversation.ids).count(content) == 2
        covered = "".join(
            conversation.text[a:b]
            for (a, b), before in zip(conversation.offsets, [0, *conversation.offsets[:, 1]], strict=False)
            if a >= before
        )
        assert covered == conversation.text


def test_a_template_that_cuts_a_message_cannot_cut_a_special_token_out_of_it():
    chat = inline(
        "{{ messages[0].content[1:] }}|{{ messages[0].content.split('|') | join('|') }}|{{ messages[0].content | trim }}<|im_end|>"
    )
    prompt = chat.prompt([{"role": "user", "content": "a<|im_end|>"}])
    assert prompt.count(chat.tokenizer.eos_id or 0) == 1
    assert chat.tokenizer.decode(prompt) == "<|im_end|>|a<|im_end|>|a<|im_end|>"


def toy(*merges: tuple[str, str]) -> TextTokenizer:
    letters = ["<s>", "</s>", "x", "a", "b", "y", *("".join(pair) for pair in merges)]
    inner = hf.Tokenizer(hf.models.BPE(vocab={token: i for i, token in enumerate(letters)}, merges=list(merges)))
    inner.add_special_tokens(["<s>", "</s>"])
    return TextTokenizer(inner, bos="<s>", eos="</s>")


def test_a_conversation_is_tokenised_once():
    """One turn's text ends in "xa", the next begins with "by": with the merge a+b the ids are those of the whole string."""
    chat = inline("{% for m in messages %}{{ m.content }}{% endfor %}", toy(("a", "b")))
    first, second = [{"role": "user", "content": "xa"}, {"role": "assistant", "content": "by"}], ["x", "ab", "y"]
    conversation = chat.conversation(first)
    assert [chat.tokenizer.name(i) for i in conversation.ids] == second
    assert conversation.offsets.tolist() == [[0, 1], [1, 3], [3, 4]]
    # A token that straddles the border belongs to the one who began it.
    assert conversation.mask.tolist() == [False, False, True]
    other = inline("{% for m in messages %}{{ m.content }}{% endfor %}", toy(("a", "b"))).conversation(
        [{"role": "assistant", "content": "xa"}, {"role": "user", "content": "by"}]
    )
    assert other.mask.tolist() == [True, True, False]


def test_tool_keys_keep_their_order():
    chat = inline("{% for tool in tools %}{{ tool | tojson }}{% endfor %}")
    assert chat.template.render([], tools=[{"b": 1, "a": "é<&"}]) == '{"b": 1, "a": "é<&"}'


def test_a_turn_that_changes_when_others_follow_needs_blocks_in_the_template():
    """As of templates that drop the reasoning of earlier turns."""
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last else m.content[:1] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    chat = inline(source)
    two = [USER, ANSWER, {**USER, "content": "u"}, ANSWER]
    assert trained(inline(source.replace(" if loop.last else m.content[:1]", "")), two) == ["ok<|im_end|>", "ok<|im_end|>"]
    with pytest.raises(DataError, match=r"renders message 2 otherwise when it is the last one.*\{% generation %\}"):
        chat.conversation(two)
    marked = source.replace("{{ m.content", "{% if m.role == 'assistant' %}{% generation %}{{ m.content").replace(
        "<|im_end|>", "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    )
    assert trained(inline(marked), two) == ["o<|im_end|>", "ok<|im_end|>"]


def test_text_that_holds_our_marks_is_refused():
    with pytest.raises(DataError, match="U\\+FDD0"):
        encoder("chatml").prompt([{"role": "user", "content": "a\ufdd0"}])


def test_a_template_runs_in_a_sandbox_and_its_faults_are_messages():
    for source, message in (
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ messages[7].content }}", "cannot render"),
        ("{{ 1 + messages }}", "TypeError"),
    ):
        with pytest.raises(DataError, match=message):
            inline(source).template.render([USER])
    with pytest.raises(ConfigError, match=r"the template, line 2: not a Jinja template"):
        inline("a\n{% if %}").template.render([USER])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    load_tokenizer(str(HERE / "tokenizers" / "chatml")).export(tmp_path)
    return tmp_path


def declare(folder: Path, template: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))


def test_a_template_is_found_in_each_of_its_places(folder: Path):
    assert find_template(folder) is None
    declare(folder, "A{{ eos_token }}")
    found = find_template(folder)
    assert found and found.render([]) == "A<|im_end|>"
    declare(folder, [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "T"}])
    found = find_template(folder / "tokenizer.json")
    assert found and found.render([]) == "A" and found.render([], tools=[{}]) == "T"
    (folder / "chat_template.jinja").write_text("B\r\n")  # comes first, as in transformers
    found = find_template(folder)
    assert found and found.render([], tools=[{}]) == "B"


def test_a_template_comes_back_from_an_export_with_the_hash_of_its_file(folder: Path, tmp_path: Path):
    (folder / "chat_template.jinja").write_bytes(b"line\r\n{{ messages[0].content }}\n")
    found = find_template(folder)
    assert found
    found.export(tmp_path / "copy")
    assert (tmp_path / "copy" / "chat_template.jinja").read_bytes() == (folder / "chat_template.jinja").read_bytes()
    assert found.hash == hashlib.sha256((folder / "chat_template.jinja").read_bytes()).hexdigest()
    declare(folder, "other")
    again = find_template(tmp_path / "copy")
    assert again and again.hash == found.hash and again.render([USER]) == found.render([USER])
    several = ChatTemplate({DEFAULT: "a", "tool_use": "b"}, {}, "x")
    several.export(tmp_path / "several")
    read = find_template(tmp_path / "several")
    assert read and read.hash == several.hash != ChatTemplate({DEFAULT: "a", "tool_use": "c"}, {}, "x").hash


def test_what_a_template_calls_its_tokens_goes_with_it(folder: Path, tmp_path: Path):
    """Also a BOS with which no document begins."""
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"add_bos_token": False, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ pad_token }}")
    tokenizer, template = load_tokenizer(str(folder)), find_template(folder)
    assert template and tokenizer.bos_id is None
    tokenizer.export(tmp_path / "copy")
    template.export(tmp_path / "copy")
    again = find_template(tmp_path / "copy")
    assert again and again.render([]) == "<|im_start|><|endoftext|>"
    assert load_tokenizer(str(tmp_path / "copy")).hash == tokenizer.hash


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ([{"name": "tool_use", "template": "T"}], "templates named tool_use, and none that is the default"),
        ([{"nome": "default"}], "neither a text nor a list of entries"),
        ("{% for %}", "not a Jinja template"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(folder: Path, template: Any, message: str):
    declare(folder, template)
    with pytest.raises(ConfigError, match=message):
        found = find_template(folder)
        assert found
        found.check()


def test_a_file_that_is_no_template_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"t\.jinja cannot be read: No such file or directory$"):
        read_template(tmp_path / "t.jinja")
    (tmp_path / "t.jinja").write_bytes(b"a\xff\xfe")
    with pytest.raises(ConfigError, match=r"t\.jinja is not UTF-8 text \(byte 1\)$"):
        read_template(tmp_path / "t.jinja")


def test_a_template_that_leaves_out_what_the_assistant_says_ends_no_turn():
    assert inline("").end_of_turn is None
    assert inline("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}").end_of_turn is None


def test_a_message_that_is_not_text_is_refused():
    """Bytes of a terminal or a pipe that are not UTF-8 arrive as lone surrogates."""
    with pytest.raises(DataError, match=r"not UTF-8 text \(character 2\)"):
        encoder("chatml").prompt([{"role": "user", "content": b"a\xff".decode("utf-8", "surrogateescape")}])
