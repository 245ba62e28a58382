"""Reads the reference fixtures: tiny models as the Hub holds them, with what transformers answered. Needs no torch."""

import functools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "fixtures"
ANSWERS = "expected.npz"


@dataclass(frozen=True)
class Fixture:
    """One model; README.md describes what `expected` and `meta` hold."""

    name: str
    folder: Path
    config: dict[str, Any]
    expected: dict[str, np.ndarray]
    meta: dict[str, Any]

    def checkpoint(self, into: Path) -> Path:
        """Put config and weights, which may be another fixture's, into a folder, made if absent, as a Hub checkpoint holds them."""
        into.mkdir(parents=True, exist_ok=True)
        sources = [self.folder / name for name in _checkpoint_files(self.folder)]
        borrowed = [FOLDER / other / name for name, other in self.meta["same_as"].items() if name != ANSWERS]
        for file in sources + borrowed:
            shutil.copyfile(file, into / file.name)
        return into

    def gradients(self) -> dict[str, tuple[float, np.ndarray, np.ndarray]]:
        """Of each parameter's gradient, under its name in the file: norm, flat indices [8] of some entries, these entries [8]."""
        e = self.expected
        rows = zip(e["grad_names"], e["grad_norms"], e["grad_index"], e["grad_values"], strict=True)
        return {str(name): (float(norm), index, values) for name, norm, index, values in rows}


def names(prefix: str = "") -> list[str]:
    """All fixtures whose name starts with `prefix`, sorted."""
    return sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir() and folder.name.startswith(prefix))


@functools.cache
def load(name: str) -> Fixture:
    """One fixture; its arrays are read-only, for all tests share them."""
    folder = FOLDER / name
    meta = json.loads((folder / "meta.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    with np.load(FOLDER / meta["same_as"].get(ANSWERS, name) / ANSWERS) as arrays:
        expected = dict(arrays)
    for array in expected.values():
        array.flags.writeable = False
    return Fixture(name, folder, config, expected, meta)


def _checkpoint_files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name not in {"meta.json", ANSWERS})
