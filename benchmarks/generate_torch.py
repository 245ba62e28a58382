"""P6's generation with transformers' `generate`, run by the peer's own Python. Prints a line for each batch it has continued.

Needs torch and transformers, and nothing of Telamon.
"""

import argparse
import os
import time

import torch  # pyright: ignore[reportMissingImports]
from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

VOCABULARY, PROMPT, TOKENS = 49152, 32, 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--attention", choices=("sdpa", "eager"), required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        attn_implementation=arguments.attention,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, arguments.dtype)).eval()
    for step in range(1, 1_000_000):
        prompts = torch.randint(0, VOCABULARY, (arguments.batch, PROMPT))
        began = time.perf_counter()
        with torch.inference_mode():
            ids = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=TOKENS,
                max_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        assert ids.shape == (arguments.batch, PROMPT + TOKENS)
        print(f"step {step}  {time.perf_counter() - began:.3f} s", flush=True)


if __name__ == "__main__":
    main()
