"""From gradients to updates: clip, then AdamW or Muon with a learning rate per group."""

import math
import re
from collections.abc import Hashable
from typing import Any

import jax
import optax
import optax.contrib

from telamon.config.schema import RunConfig
from telamon.errors import ConfigError
from telamon.models.weights import Model, WeightInfo, Weights, flatten
from telamon.parallel.target import target
from telamon.train.schedule import learning_rate_schedule

_MUON_RMS = 0.2
"""Root mean square of Muon's updates, as AdamW's are in practice (Liu et al. 2025, "Muon is scalable", section 2.2)."""


def build_optimizer(config: RunConfig, model: Model) -> optax.GradientTransformation:
    """The optimizer of a run.

    Muon takes the hidden matrices; embeddings, the head, routers, scales and biases go to AdamW. Weight decay reaches matrices only.
    Buffers stay as they are.

    Raises:
        ConfigError: a group's pattern matches no weight.
    """
    settings = config.optimizer
    labels = _labels(config, model)
    decayed = model.map_info(lambda info: info.role != "vector")
    peaks = {"base": settings.learning_rate} | {f"group{i}": group.learning_rate for i, group in enumerate(settings.groups)}
    rules: dict[Hashable, optax.GradientTransformation] = {}
    for label in set(flatten(labels).values()):
        rule, group = label.split(":")
        if rule == "none":
            rules[label] = optax.set_to_zero()
            continue
        direction = (
            _muon(settings.momentum, model) if rule == "muon" else optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=settings.eps)
        )
        rules[label] = optax.chain(
            direction,
            optax.add_decayed_weights(settings.weight_decay, mask=lambda tree: _like(tree, decayed)),
            optax.scale_by_learning_rate(learning_rate_schedule(config, peak=peaks[group])),
        )
    clip = optax.identity() if settings.clip_norm is None else optax.clip_by_global_norm(settings.clip_norm)
    directions = optax.partition(rules, labels)
    return optax.chain(clip, _streaming(directions) if settings.offload else directions)


def _streaming(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer whose moments are in the host's memory: they come to the devices for one weight at a time, and go back.

    Left to itself, the compiler fetches them all at once: there would be no room won. So each weight's moments wait until those of the
    weight before are back. Nothing else changes: not the state's names, and numbers by rounding at most.
    """

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        if target().platform == "cpu":  # its memory is the host's
            return optimizer.update(updates, _to_device(state), params)
        numbers = jax.tree.unflatten(jax.tree.structure(updates), range(len(jax.tree.leaves(updates))))
        done: Any = None
        results = []
        for number in jax.tree.leaves(numbers):

            def only(leaf: Any, own: int, number: int = number) -> Any:
                return leaf if own == number else optax.MaskedNode()

            moments = optax.tree_utils.tree_map_params(optimizer, only, state, numbers, is_leaf=_masked)
            moments, _ = jax.lax.optimization_barrier((moments, done))
            parts = jax.tree.map(only, updates, numbers), _to_device(moments), jax.tree.map(only, params, numbers)
            changed, moments = optimizer.update(*parts)
            done = optax.tree_utils.tree_map_params(optimizer, _to_host, moments, is_leaf=_masked)
            results.append((changed, done))
        return jax.tree.map(lambda *parts: next((part for part in parts if not _masked(part)), parts[0]), *results, is_leaf=_masked)

    return optax.GradientTransformation(optimizer.init, update)


def _to_device(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), state)


def _to_host(leaf: Any) -> Any:
    return leaf if _masked(leaf) else jax.device_put(leaf, jax.memory.Space.Host)


def _masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _labels(config: RunConfig, model: Model) -> Weights:
    """For each weight `rule:group`."""
    paths = list(flatten(model.info))
    patterns = [re.compile(group.match) for group in config.optimizer.groups]
    for pattern in patterns:
        if not any(pattern.search(path) for path in paths):
            raise ConfigError(f"optimizer.groups: {pattern.pattern!r} matches no weight; there are {', '.join(paths[:4])}, ...")

    def label(path: str, info: WeightInfo) -> str:
        if info.role == "buffer":
            return "none:base"
        rule = "muon" if config.optimizer.kind == "muon" and info.role == "hidden" else "adamw"
        group = next((f"group{i}" for i, pattern in enumerate(patterns) if pattern.search(path)), "base")
        return f"{rule}:{group}"

    return _map_paths(model.info, label)


def _muon(momentum: float, model: Model) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024), for one layer of a stack after the other.

    Its products read whole matrices. For all layers at once, devices would hold every matrix whole, and more than one of each.
    """

    def dims(info: WeightInfo) -> optax.contrib.MuonDimensionNumbers | None:
        return None if info.matrix is None else optax.contrib.MuonDimensionNumbers(*info.matrix)

    dimensions = model.map_info(dims)
    at_once = optax.contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=lambda tree: _like(tree, dimensions))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        where = target()
        if where.platform == "cpu" and where.device_count == 1:  # the default run's step takes a tenth longer in loops
            return at_once.update(updates, state, params)

        def of_weight(gradient: Any, moment: Any, dims: Any) -> Any:
            if _masked(gradient):
                return gradient
            stacked = 0 not in (*dims.reduction_axis, *dims.output_axis)
            own = optax.contrib.MuonDimensionNumbers(*(tuple(dim - stacked for dim in part) for part in dims))
            rule = optax.contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=own)

            def of_matrix(parts: tuple[jax.Array, jax.Array]) -> Any:
                return rule.update(parts[0], state._replace(mu=parts[1]))[0]

            return jax.lax.map(of_matrix, (gradient, moment)) if stacked else of_matrix((gradient, moment))

        changed = jax.tree.map(of_weight, updates, state.mu, _like(updates, dimensions), is_leaf=_masked)
        # Not from the loops: what comes out of a loop cannot take the place of what went in.
        moments = optax.tree.update_moment(updates, state.mu, momentum, 1)
        return changed, state._replace(count=optax.safe_increment(state.count), mu=moments)

    return optax.chain(
        optax.GradientTransformation(at_once.init, update),
        optax.stateless(lambda updates, _: jax.tree.map(_scale_to_adamw, updates, _like(updates, dimensions))),
    )


def _scale_to_adamw(update: jax.Array, dims: Any) -> jax.Array:
    """An orthogonal matrix of m x n has a root mean square of 1 / sqrt(max(m, n)); bring it to `_MUON_RMS`."""
    sizes = [math.prod(update.shape[dim] for dim in part) for part in (dims.reduction_axis, dims.output_axis)]
    return update * (_MUON_RMS * math.sqrt(max(sizes)))


def _like(tree: Any, values: Weights) -> Any:
    """`values` where `tree` has a weight, and the tree's own placeholder where `optax.partition` masked one."""
    if isinstance(tree, dict):
        return {key: _like(child, values[key]) for key, child in tree.items()}
    return tree if _masked(tree) else values


def _map_paths(tree: Weights, function, prefix: str = "") -> Weights:
    if isinstance(tree, dict):
        return {key: _map_paths(child, function, f"{prefix}{key}.") for key, child in tree.items()}
    return function(prefix[:-1], tree)
