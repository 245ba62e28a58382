"""What a text costs an exported folder in transformers: to be compared with `telamon perplexity RUN FILE --json`.

Runs in the environment that `make_fixtures.py` describes:

    ENV/bin/python tests/reference/check_perplexity.py FOLDER FILE --context 512 --stride 256

Prints one JSON object: `loss` (nats a token), `perplexity`, `tokens`; `versions`.
"""
# pyright: reportMissingImports=false

import argparse
import json
import math
import platform
from pathlib import Path

import torch
import transformers
from check_export import load


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a text with transformers.")
    parser.add_argument("folder", type=Path, help="holds config.json, safetensors and a tokenizer")
    parser.add_argument("file", type=Path, help="UTF-8 text")
    parser.add_argument("--context", required=True, type=int, help="tokens of a window")
    parser.add_argument("--stride", required=True, type=int, help="tokens from one window to the next")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ids = transformers.AutoTokenizer.from_pretrained(args.folder)(args.file.read_text(encoding="utf-8")).input_ids
    nll = losses(load(args.folder), ids, args.context, args.stride)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    loss = math.fsum(nll) / len(nll)
    print(json.dumps({"loss": loss, "perplexity": math.exp(loss), "tokens": len(nll), "versions": versions}))


@torch.no_grad()
def losses(model: torch.nn.Module, ids: list[int], context: int, stride: int) -> list[float]:
    """Of each token but the first, once, in the first window that holds it as a target."""
    found: list[float] = []
    for begin in range(0, len(ids) - 1, stride):
        window = torch.tensor(ids[begin : begin + context + 1])
        shares = torch.log_softmax(model(window[None, :-1]).logits[0].double(), dim=-1)
        each = -shares.gather(1, window[1:, None])[:, 0]
        found += each[len(found) - begin :].tolist()
        if len(found) == len(ids) - 1:
            break
    return found


if __name__ == "__main__":
    main()
