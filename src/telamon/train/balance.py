"""Experts' loads after a step: what is told of them, and the biases that even them out without a loss.

A router that has a selection bias adds it to its scores when it chooses, and nowhere else. After each step it falls for experts with
more than the mean load and rises for those with less (Wang et al. 2024, "Auxiliary-loss-free load balancing", algorithm 1).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from telamon.layers.parts import Load
from telamon.models.weights import Weights

_BIAS = ("router", "selection_bias")


def moved_biases(weights: Weights, loads: Mapping[str, Load], *, rate: float) -> Weights:
    """Weights with every selection bias moved by `rate` towards an even load.

    Args:
        weights: after the optimizer's update, which leaves biases alone.
        loads: counts of the whole step, over all microbatches and devices.
        rate: how far; an expert with just the mean load stays.
    """
    if rate:
        for path, load in loads.items():
            excess = load.counts - jnp.mean(load.counts, axis=-1, keepdims=True)
            weights = _changed(weights, (*path.split("."), *_BIAS), -rate * jnp.sign(excess))
    return weights


def _changed(tree: Any, path: tuple[str, ...], change: jax.Array) -> Any:
    """The tree with `change` added to one leaf; as it is where it has no such leaf."""
    name, *rest = path
    if name not in tree:
        return tree
    return tree | {name: _changed(tree[name], tuple(rest), change) if rest else tree[name] + change}


def load_metrics(loads: Mapping[str, Load]) -> dict[str, jax.Array]:
    """The busiest and the idlest expert's load over the mean load, each averaged over layers; nothing for a model without experts."""
    if not loads:
        return {}
    shares = [load.counts / jnp.maximum(jnp.mean(load.counts, axis=-1, keepdims=True), 1e-20) for load in loads.values()]
    extremes = {"expert_load_max": jnp.max, "expert_load_min": jnp.min}
    return {name: jnp.mean(jnp.concatenate([jnp.atleast_1d(of(s, axis=-1)) for s in shares])) for name, of in extremes.items()}
