"""What a model answers: logits in every kind of batch, loss, gradients, and a greedy decode with its cache."""
# pyright: reportMissingImports=false

from typing import Any

import numpy as np
import torch
from fixture_experts import CHOICE, Piece, Unlucky, watched
from fixture_variants import Variant
from transformers import DynamicCache

Arrays = dict[str, np.ndarray]

ROWS, LENGTH = 2, 24
DOCUMENTS = (9, 3, 12)
PADS = 5
LONG = 8
PROMPT, NEW_TOKENS = 8, 16
ENTRIES = 8
MARGIN = 5e-3
"""By which the best token of a decode step leads: far above what the order of a sum may change."""


def logits(model: Any, ids: torch.Tensor, *, mask: torch.Tensor | None = None, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [B, T, V]; a mask of ones is passed unless another is given, so that no packing is read out of the positions."""
    mask = torch.ones_like(ids) if mask is None else mask
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


def far_logits(model: Any, ids: torch.Tensor, *, positions: torch.Tensor) -> torch.Tensor:
    """Logits [1, T, V] of a row at these positions, which rise by one."""
    return model(input_ids=ids, use_cache=False, **_far(model, positions)).logits


def stream_sizes(model: Any, ids: torch.Tensor, *, positions: torch.Tensor) -> torch.Tensor:
    """Root mean square of the stream at each position, behind the embedding, each layer but the last, and the final norm [L + 1, T]."""
    out = model(input_ids=ids, use_cache=False, output_hidden_states=True, **_far(model, positions))
    return torch.stack([layer[0].square().mean(-1).sqrt() for layer in out.hidden_states])


class _Earlier(DynamicCache):
    """A cache that says how many tokens came before, and holds none of them."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.count

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


def _far(model: Any, positions: torch.Tensor) -> dict[str, Any]:
    """Arguments for a row at these positions [1, T].

    Llama 4 counts chunks and temperatures by place behind what a cache holds, not by position: it is told both.
    """
    chunk = getattr(model.config.get_text_config(), "attention_chunk_size", None)
    if chunk is None:
        return {"attention_mask": torch.ones_like(positions), "position_ids": positions}
    query, key = positions[0][:, None], positions[0][None, :]
    seen = {"full_attention": query >= key, "chunked_attention": (query >= key) & (query // chunk == key // chunk)}
    masks = {kind: torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None] for kind, mask in seen.items()}
    return {"attention_mask": masks, "position_ids": positions, "past_key_values": _Earlier(int(positions[0, 0]))}


def token_rows(model: Any, variant: Variant) -> Arrays:
    """Random token ids for every part; both plain rows hold the id that pads the padded one."""
    vocab = model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocab, (ROWS, LENGTH))
    ids[:, 3] = 0
    return {
        "ids": _numpy(ids),
        "packed_ids": _numpy(torch.randint(0, vocab, (sum(DOCUMENTS),))),
        "packed_lengths": np.array(DOCUMENTS),
        "long_ids": _numpy(torch.randint(0, vocab, (LONG,))),
        "long_offsets": np.array(variant.offsets),
        "jump_positions": np.array(variant.jumps),
    }


@torch.no_grad()
def forward_outputs(model: Any, rows: Arrays) -> Arrays:
    """Logits at every position of the plain, packed, left-padded, long and jumping rows."""
    tensor = {name: torch.from_numpy(rows[name]) for name in ("ids", "packed_ids", "long_ids", "long_offsets", "jump_positions")}
    padded = torch.cat([torch.zeros(PADS, dtype=torch.long), tensor["ids"][1]])[None]
    mask = (torch.arange(padded.shape[1]) >= PADS).long()[None]
    positions = (torch.arange(padded.shape[1]) - PADS).clamp(min=0)[None]
    documents = tensor["packed_ids"].split(list(DOCUMENTS))
    long_ids = tensor["long_ids"][None]
    long_positions = [offset + torch.arange(LONG)[None] for offset in tensor["long_offsets"]]
    found = {
        "logits": _numpy(logits(model, tensor["ids"])),
        "packed_logits": np.concatenate([_numpy(logits(model, document[None])[0]) for document in documents]),
        "padded_ids": _numpy(padded[0]),
        "padded_mask": _numpy(mask[0]),
        "padded_positions": _numpy(positions[0]),
        "padded_logits": _numpy(_padded_logits(model, padded, mask, positions)),
        "long_logits": np.stack([_numpy(far_logits(model, long_ids, positions=where)[0]) for where in long_positions]),
        "long_streams": np.stack([_numpy(stream_sizes(model, long_ids, positions=where)) for where in long_positions]),
        "jump_logits": _numpy(logits(model, long_ids, positions=tensor["jump_positions"][None])[0]),
    }
    assert all(np.isfinite(array).all() for array in found.values())
    return found


def counts_pads(model: Any) -> bool:
    """Whether pads change what real tokens get: Llama 4 counts them in the temperature of its queries."""
    return getattr(model.config.get_text_config(), "attn_temperature_tuning", False)


def _padded_logits(model: Any, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Of the real tokens [T, V]."""
    if counts_pads(model):
        return logits(model, ids[:, PADS:])[0]
    return logits(model, ids, mask=mask, positions=positions)[0, PADS:]


def gradients(model: Any, ids: np.ndarray, tensors: dict[str, Piece]) -> Arrays:
    """Mean next-token loss of the rows; of its gradient by each parameter, under its name in the file, the norm and some entries.

    The entries lie among the larger half, for a gradient may vanish elsewhere: on the embeddings of absent tokens, say.
    """
    tokens = torch.from_numpy(ids)
    model.zero_grad()
    # A table with a pad id gets no gradient from that id's look-ups, though here it is a token like any other.
    model.get_input_embeddings().padding_idx = None
    out = logits(model, tokens)
    loss = torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {name: piece.of(grads[piece.parameter]).flatten() for name, piece in tensors.items()}
    idle = [name for name, grad in found.items() if not grad.any()]
    if idle:
        raise Unlucky(f"no gradient reaches {len(idle)} tensors, {idle[0]} for one")
    index = {name: _some_large(grad) for name, grad in found.items()}
    return {
        "loss": _numpy(loss),
        "grad_names": np.array(list(found)),
        "grad_norms": np.array([grad.double().norm().item() for grad in found.values()]),
        "grad_index": np.stack([_numpy(i) for i in index.values()]),
        "grad_values": np.stack([_numpy(grad[index[name]]) for name, grad in found.items()]),
    }


def _some_large(grad: torch.Tensor) -> torch.Tensor:
    large = grad.abs().argsort(descending=True)[: max(ENTRIES, len(grad) // 2)]
    return large[torch.randperm(len(large))[:ENTRIES]].sort().values


@torch.no_grad()
def decode(model: Any) -> Arrays:
    """A greedy decode through the model's own cache, from the first prompt whose every step has a clear winner."""
    vocab = model.get_input_embeddings().num_embeddings
    for _ in range(100):
        prompt = torch.randint(0, vocab, (1, PROMPT))
        done = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        steps, ids = torch.cat(done.logits), done.sequences[0]
        first, second = steps.topk(2).values.T
        with watched() as choices:
            again = logits(model, ids[None])[0, PROMPT - 1 : -1]
        if (first - second).min() > MARGIN and choices.margin > CHOICE and len(ids[PROMPT:].unique()) > 2:
            break
    else:
        raise AssertionError("no prompt decodes with a clear winner at every step and to more than two tokens")
    assert (steps - again).abs().max() < 3e-5, "transformers' decode with cache differs from its forward without"
    return {"prompt_ids": _numpy(prompt[0]), "decode_ids": _numpy(ids[PROMPT:]), "decode_logits": _numpy(steps)}


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()
