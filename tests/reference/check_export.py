"""Prove that transformers reads an exported folder unchanged, and say what it writes with it.

Runs in the environment that `make_fixtures.py` describes:

    ENV/bin/python tests/reference/check_export.py FOLDER --prompt-ids 1,2,3 --tokens 16

Prints one JSON object: `ids` [tokens], decoded greedily with no regard to an end of text; `logits` [V] after the prompt;
`parameters`, how many numbers the model holds; `versions`. Fails, naming them, on tensors that are missing, left over or of
another shape.
"""
# pyright: reportMissingImports=false

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def main() -> None:
    parser = argparse.ArgumentParser(description="Prove that transformers reads an exported folder unchanged.")
    parser.add_argument("folder", type=Path, help="holds config.json and safetensors")
    parser.add_argument(
        "--prompt-ids", required=True, type=lambda text: [int(part) for part in text.split(",")], help="token ids, with commas"
    )
    parser.add_argument("--tokens", default=16, type=int, help="how many to decode")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(json.dumps(answer(load(args.folder), args.prompt_ids, args.tokens)))


def load(folder: Path) -> Any:
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    wrong = {kind: sorted(map(str, what)) for kind, what in found.items() if what}
    if wrong:
        sys.exit(f"{folder}: {json.dumps(wrong)}")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # others take only widths that are multiples of four
    return model.eval()


@torch.no_grad()
def answer(model: Any, prompt: list[int], tokens: int) -> dict[str, Any]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return {
        "ids": out.sequences[0, len(prompt) :].tolist(),
        "logits": out.logits[0][0].tolist(),
        "parameters": model.num_parameters(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()},
    }


if __name__ == "__main__":
    main()
