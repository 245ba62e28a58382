"""Record what transformers makes of conversations with templates of ours, in the published formats.

Runs in the environment that `make_fixtures.py` describes, with jinja2 in it:

    ENV/bin/python tests/reference/make_chat_expectations.py

Reads `chat/templates/*.jinja` and `chat/conversations.json`; writes `chat/tokenizers/` (byte-level and of SentencePiece's kind, each trained on a
few words) and `chat/expected.json`: for each template and conversation the text, the ids and, where the template has `{% generation %}`
blocks, the assistant's mask, or the message with which the template refuses.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import json
import platform
from pathlib import Path
from typing import Any

import jinja2
import tokenizers as hf
import transformers

HERE = Path(__file__).parent / "chat"
WORDS = "the cat sat on the mat; say ok! <|im_start|>user\nhello naïve 数学 assistant model system tools"
TOKENIZERS = {
    # Kind, BOS, EOS, further special tokens.
    "chatml": ("bytes", "<|im_start|>", "<|im_end|>", ["<|endoftext|>"]),
    "llama3": ("bytes", "<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"]),
    "gemma": ("pieces", "<bos>", "<end_of_turn>", ["<eos>", "<start_of_turn>", "<pad>"]),
}
USES = {"chatml": "chatml", "chatml-generation": "chatml", "chatml-tools": "chatml", "llama3": "llama3", "gemma": "gemma"}


def make_tokenizer(kind: str, bos: str, eos: str, more: list[str]) -> hf.Tokenizer:
    inner = hf.Tokenizer(hf.models.BPE(byte_fallback=kind == "pieces", fuse_unk=True, unk_token="<unk>" if kind == "pieces" else None))
    special = [bos, eos, *more, *(["<unk>"] if kind == "pieces" else [])]
    if kind == "bytes":
        inner.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = hf.decoders.ByteLevel()
        alphabet, spare = hf.pre_tokenizers.ByteLevel.alphabet(), []
    else:
        inner.normalizer = hf.normalizers.Replace(" ", "▁")
        inner.decoder = hf.decoders.Sequence([hf.decoders.Replace("▁", " "), hf.decoders.ByteFallback(), hf.decoders.Fuse()])
        alphabet, spare = [], [f"<0x{b:02X}>" for b in range(256)]
    trainer = hf.trainers.BpeTrainer(
        vocab_size=len(special) + 300, special_tokens=[*special, *spare], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([WORDS] * 3, trainer)
    layout = json.loads(inner.to_str())
    layout["added_tokens"] = [token for token in layout["added_tokens"] if token["content"] in special]
    inner = hf.Tokenizer.from_str(json.dumps(layout))
    # Plain texts get BOS; a template writes it itself, so that both together would give two.
    inner.post_processor = hf.processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))])
    return inner


def main() -> None:
    for name, (kind, bos, eos, more) in TOKENIZERS.items():
        folder = HERE / "tokenizers" / name
        folder.mkdir(parents=True, exist_ok=True)
        make_tokenizer(kind, bos, eos, more).save(str(folder / "tokenizer.json"), pretty=False)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    conversations = json.loads((HERE / "conversations.json").read_text(encoding="utf-8"))
    expected = [
        {"template": template, "tokenizer": tokenizer, "conversation": name, **answer(template, tokenizer, conversation)}
        for template, tokenizer in USES.items()
        for name, conversation in conversations.items()
    ]
    packages = (transformers, hf, jinja2)
    versions = {package.__name__: package.__version__ for package in packages} | {"python": platform.python_version()}
    text = json.dumps({"versions": versions, "expected": expected}, indent=1, ensure_ascii=False)
    (HERE / "expected.json").write_text(text + "\n", encoding="utf-8")


def answer(template: str, tokenizer: str, conversation: dict[str, Any]) -> dict[str, Any]:
    reader = transformers.AutoTokenizer.from_pretrained(HERE / "tokenizers" / tokenizer)
    source = (HERE / "templates" / f"{template}.jinja").read_bytes().decode()
    with_mask = "{% generation" in source and not conversation.get("add_generation_prompt")
    how = {**conversation, "chat_template": source}
    messages = how.pop("messages")
    try:
        text = reader.apply_chat_template(messages, tokenize=False, **how)
    except jinja2.TemplateError as error:
        return {"refused": error.message}
    encoded = reader.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=with_mask, **how)
    mask = {"mask": encoded["assistant_masks"]} if with_mask else {}
    return {"text": text, "ids": encoded["input_ids"], **mask}


if __name__ == "__main__":
    main()
