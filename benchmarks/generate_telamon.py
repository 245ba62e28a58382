"""P6's generation with Telamon: random weights of SmolLM2-135M's size, greedy. Prints a line for each batch it has continued."""

import argparse
import time

import jax
import numpy as np

from telamon.infer.engine import Generator
from telamon.infer.sampling import Sampling
from telamon.models.decoder import Numerics
from telamon.models.llama import LlamaConfig
from telamon.models.weights import Model

SIZES = LlamaConfig(
    vocab_size=49152,
    d_model=576,
    n_layers=30,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    d_ff=1536,
    tie_embeddings=True,
    rope_theta=100_000.0,
    norm_eps=1e-5,
)
PROMPT, TOKENS = 32, 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    arguments = parser.parse_args()
    model = Model(SIZES.spec(), Numerics(dtype=arguments.dtype))
    generator = Generator(model, jax.jit(model.init)(jax.random.key(0)), eos_ids=())
    random = np.random.default_rng(0)
    for step in range(1, 1_000_000):
        prompts = random.integers(0, SIZES.vocab_size, (arguments.batch, PROMPT)).tolist()
        began = time.perf_counter()
        session = generator.start(prompts, max_tokens=TOKENS, sampling=Sampling(temperature=0))
        while session.running:
            session.advance()
        assert all(len(tokens) == TOKENS for tokens in session.tokens)
        print(f"step {step}  {time.perf_counter() - began:.3f} s", flush=True)


if __name__ == "__main__":
    main()
