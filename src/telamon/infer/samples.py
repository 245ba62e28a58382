"""Samples at the end of a run: what the model writes, in the terminal and in `samples.txt`."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from telamon.config.schema import RunConfig
from telamon.data.tokenizer import Tokenizer
from telamon.infer.engine import Generator
from telamon.infer.sampling import Sampling
from telamon.infer.text import Completion, complete
from telamon.models.weights import Model, Weights
from telamon.watch.files import join, write_text

SAMPLES = "samples.txt"


def write_samples(
    config: RunConfig, *, model: Model, weights: Weights, mesh: Mesh, tokenizer: Tokenizer, run_dir: str, show: Callable[[str], None]
) -> list[Completion]:
    """Continue the prompts of `config.sample`, show the texts and write them to the run's `samples.txt`.

    Nothing is drawn where `sample.tokens` is 0 or the run's data are no text. In a run of several processes each one
    calls this, and the first writes.
    """
    sample = config.sample
    if sample.tokens == 0 or not sample.prompts or not tokenizer.token_bytes.any():
        return []
    ends = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    generator = Generator(model, weights, eos_ids=ends, vocab_size=tokenizer.vocab_size, mesh=mesh)
    sampling = Sampling(temperature=sample.temperature)
    completions = complete(generator, tokenizer, sample.prompts, max_tokens=sample.tokens, sampling=sampling, seed=config.train.seed)
    text = "\n\n".join(f"--- {completion.prompt!r}\n{completion.prompt}{completion.text}" for completion in completions) + "\n"
    show(text)
    if jax.process_index() == 0:
        write_text(join(run_dir, SAMPLES), text)
    return completions
