"""P1's train step in PyTorch, run by the peer's own Python: transformers' LlamaForCausalLM and torch's AdamW in float32.

Prints a line a step. Needs torch and transformers, and nothing of Telamon.
"""

import os
import time

import torch  # pyright: ignore[reportMissingImports]
from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

VOCABULARY, ROWS, LENGTH = 8192, 8, 512


def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {torch.get_num_threads()} threads", flush=True)
    # The fused update is torch's fastest on CPU.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(1, 1_000_000):
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}  loss {loss.item():.3f}  {time.perf_counter() - began:.3f} s", flush=True)


if __name__ == "__main__":
    main()
