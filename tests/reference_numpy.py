"""A decoder in float64 NumPy, written from the papers with plain loops and none of the library's code: an outside truth."""

from collections.abc import Mapping, Sequence

import numpy as np

Layer = tuple[str, int, float]
"""Where a layer's weights are: the prefix of their paths, the index on the layer axis; and its rotary base."""


def rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Turn each pair (x[i], x[i + H/2]) of one head by position * theta^(-2i/H)."""
    half = len(x) // 2
    turned = np.empty(len(x))
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        turned[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        turned[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return turned


def rotate_neighbours(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Turn each pair (x[2i], x[2i + 1]) of one head, as a complex number, by position * theta^(-2i/H)."""
    turned = np.empty(len(x))
    for i in range(len(x) // 2):
        pair = complex(x[2 * i], x[2 * i + 1]) * np.exp(1j * position * theta ** (-2 * i / len(x)))
        turned[2 * i], turned[2 * i + 1] = pair.real, pair.imag
    return turned


def attention(q_TNH: np.ndarray, k_SKH: np.ndarray, v_SKH: np.ndarray, mask_TS: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
    """Softmax attention; query head n reads kv head n // (N / K); a query that sees nothing gives zeros; a sink adds to the sum alone."""
    T, N, H = q_TNH.shape
    group = N // k_SKH.shape[1]
    out = np.zeros((T, N, H))
    for t in range(T):
        keys = np.flatnonzero(mask_TS[t])
        if not len(keys):
            continue
        for n in range(N):
            scores = k_SKH[keys, n // group] @ q_TNH[t, n] / np.sqrt(H)
            weights = np.exp(scores - scores.max())
            sink = 0.0 if sinks is None else np.exp(sinks[n] - scores.max())
            out[t, n] = weights / (weights.sum() + sink) @ v_SKH[keys, n // group]
    return out


def sees(positions: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Query t sees key s of its own document that is no later, and padding (segment 0) is seen by nobody."""
    T = len(positions)
    return np.array([[segments[t] == segments[s] > 0 and positions[s] <= positions[t] for s in range(T)] for t in range(T)])


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gated_mlp(x: np.ndarray, weights: Mapping[str, np.ndarray]) -> np.ndarray:
    """down(silu(gate x) * (up x)), with biases where there are any."""
    gate = x @ weights["gate"] + weights.get("gate_bias", 0.0)
    up = x @ weights["up"] + weights.get("up_bias", 0.0)
    return silu(gate) * up @ weights["down"] + weights.get("down_bias", 0.0)


def mixer(
    x_TD: np.ndarray, weights: Mapping[str, np.ndarray], *, positions: np.ndarray, segments: np.ndarray, theta: float, eps: float
) -> np.ndarray:
    """Grouped-query attention with rotary positions, and with the norms of queries and keys where there are any."""
    projected = {}
    for name in ("query", "key", "value"):
        projected[name] = np.einsum("td,dnh->tnh", x_TD, weights[name]) + weights.get(f"{name}_bias", 0.0)
    for name in ("query", "key"):
        if f"{name}_norm.scale" in weights:
            projected[name] = rms_norm(projected[name], weights[f"{name}_norm.scale"], eps)
        projected[name] = np.array(
            [[rotate(head, int(p), theta) for head in token] for token, p in zip(projected[name], positions, strict=True)]
        )
    mixed = attention(projected["query"], projected["key"], projected["value"], sees(positions, segments))
    return np.einsum("tnh,nhd->td", mixed, weights["out"]) + weights.get("out_bias", 0.0)


def latent_mixer(
    x_TD: np.ndarray,
    weights: Mapping[str, np.ndarray],
    *,
    positions: np.ndarray,
    segments: np.ndarray,
    angles: np.ndarray,
    kv_rank: int,
    nope_dim: int,
    scale: float,
    eps: float,
) -> np.ndarray:
    """Multi-head latent attention head by head; `angles` [R / 2] is what neighbouring features turn by in one position."""
    positions = np.asarray(positions)
    queries = "query_down" in weights
    if queries:
        x_q = rms_norm(x_TD @ weights["query_down"] + weights.get("query_down_bias", 0.0), weights["query_norm.scale"], eps)
    else:
        x_q = x_TD
    q_weight = weights["query_up" if queries else "query"]
    down = x_TD @ weights["kv_down"] + weights.get("kv_down_bias", 0.0)
    latent = rms_norm(down[:, :kv_rank], weights["kv_norm.scale"], eps)
    key_turned = turn_neighbours(down[:, kv_rank:], positions, angles)
    mask, out = sees(positions, segments), np.zeros((len(x_TD), weights["out"].shape[2]))
    for head in range(q_weight.shape[1]):
        q = x_q @ q_weight[:, head]
        up = latent @ weights["kv_up"][:, head]
        key, value = up[:, :nope_dim], up[:, nope_dim:]
        q_turned = turn_neighbours(q[:, nope_dim:], positions, angles)
        scores = scale * (q[:, :nope_dim] @ key.T + q_turned @ key_turned.T)
        for t in range(len(x_TD)):
            if mask[t].any():
                shares = np.exp(scores[t, mask[t]] - scores[t, mask[t]].max())
                out[t] += shares / shares.sum() @ value[mask[t]] @ weights["out"][head]
    return out + weights.get("out_bias", 0.0)


def turn_neighbours(x_TR: np.ndarray, positions: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Each pair (x[2i], x[2i + 1]) as a complex number times e^(i position angle)."""
    pairs = x_TR[:, 0::2] + 1j * x_TR[:, 1::2]
    turned = pairs * np.exp(1j * positions[:, None] * angles)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x_TR.shape)


def decoder_logits(
    flat: Mapping[str, np.ndarray], tokens: np.ndarray, *, positions: np.ndarray, segments: np.ndarray, layers: Sequence[Layer], eps: float
) -> np.ndarray:
    """Logits [T, V] of one row; `flat` holds weights by dotted path, those of stacks with a leading layer axis."""
    flat = {path: np.asarray(value, np.float64) for path, value in flat.items()}
    return decoder_hidden(flat, tokens, positions=positions, segments=segments, layers=layers, eps=eps) @ head(flat)


def decoder_hidden(
    flat: Mapping[str, np.ndarray], tokens: np.ndarray, *, positions: np.ndarray, segments: np.ndarray, layers: Sequence[Layer], eps: float
) -> np.ndarray:
    """Normed hidden states [T, D] of one row."""
    stream = flat["embedding"][tokens]
    for prefix, index, theta in layers:
        weights = {path: value[index] for path, value in _under(flat, prefix).items()}
        stream = block(stream, weights, positions=positions, segments=segments, theta=theta, eps=eps)
    return rms_norm(stream, flat["norm.scale"], eps)


def block(
    stream: np.ndarray, weights: Mapping[str, np.ndarray], *, positions: np.ndarray, segments: np.ndarray, theta: float, eps: float
) -> np.ndarray:
    """A layer with norms before its parts [T, D] -> [T, D]."""
    normed = rms_norm(stream, weights["mixer_norm.scale"], eps)
    stream = stream + mixer(normed, _under(weights, "mixer."), positions=positions, segments=segments, theta=theta, eps=eps)
    normed = rms_norm(stream, weights["ffn_norm.scale"], eps)
    return stream + gated_mlp(normed, _under(weights, "ffn."))


def head(flat: Mapping[str, np.ndarray]) -> np.ndarray:
    """The output head [D, V], or the table turned over."""
    return flat["head"] if "head" in flat else flat["embedding"].T


def further_logits(
    flat: Mapping[str, np.ndarray], tokens: np.ndarray, *, layers: Sequence[Layer], depths: int, eps: float
) -> list[np.ndarray]:
    """Of one whole document of n tokens, its own logits [n, V], and those [n - k, V] of each depth k < n of multi-token prediction."""
    flat = {path: np.asarray(value, np.float64) for path, value in flat.items()}
    n = len(tokens)
    hidden = decoder_hidden(flat, tokens, positions=np.arange(n), segments=np.ones(n), layers=layers, eps=eps)
    logits = [hidden @ head(flat)]
    for depth in range(1, min(depths, n - 1) + 1):
        weights, places = _under(flat, f"mtp.{depth - 1}."), n - depth
        rows = []
        for i in range(places):
            embedded = rms_norm(flat["embedding"][tokens[i + depth]], weights["enorm.scale"], eps)
            rows.append(np.concatenate([embedded, rms_norm(hidden[i], weights["hnorm.scale"], eps)]) @ weights["projection"])
        stream = np.array(rows)
        where = {"positions": np.arange(places), "segments": np.ones(places)}
        stream = block(stream, _under(weights, "block."), **where, theta=layers[-1][2], eps=eps)
        hidden = rms_norm(stream, weights["norm.scale"], eps)
        logits.append(hidden @ head(flat))
    return logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _under(weights: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {path.removeprefix(prefix): value for path, value in weights.items() if path.startswith(prefix)}
