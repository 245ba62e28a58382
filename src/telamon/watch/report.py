"""`report.html`: a run on one page that needs no network, no script and no server."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import yaml

from telamon.watch.chart import Reference, Series, line_chart
from telamon.watch.environment import ENVIRONMENT
from telamon.watch.files import join, read_text, write_text
from telamon.watch.log import human_bytes, human_seconds
from telamon.watch.summary import SUMMARY
from telamon.watch.trackers import read_metrics

REPORT = "report.html"


def write_report(run_dir: str | os.PathLike[str]) -> str:
    """Write the report of a run from the files in its directory, and return the report's path.

    Files that are not there (a run that was stopped early has no summary) leave their part of the page out.
    """
    path = join(run_dir, REPORT)
    name = os.path.basename(os.fspath(run_dir).rstrip("/"))
    lines = read_metrics(run_dir)
    summary = _read_json(run_dir, SUMMARY)
    environment = _read_json(run_dir, ENVIRONMENT)
    parts = [
        _head(name, environment),
        _tiles(summary),
        f'<section class="charts">{"".join(_charts(lines, summary.get("gzip_bits_per_byte")))}</section>',
        _samples(read_text(join(run_dir, "samples.txt"))),
        _data(_read_json(run_dir, "data.json")),
        _config(read_text(join(run_dir, "config.yaml"))),
        _environment(environment),
    ]
    style = f"<style>{_STYLE}</style>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(name)}</title>{style}'
    write_text(path, f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{"".join(parts)}\n</main></body></html>\n')
    return path


def _read_json(run_dir: str | os.PathLike[str], name: str) -> dict[str, Any]:
    return json.loads(read_text(join(run_dir, name)) or "{}")


def _head(name: str, environment: Mapping[str, Any]) -> str:
    devices = environment.get("devices", {})
    device = environment.get("cpu", {}).get("model") if devices.get("platform") == "cpu" else devices.get("kind")
    facts = [
        environment.get("time", "")[:16].replace("T", " "),
        f"{devices['count']} × {device}" if devices else "",
        f"telamon {environment.get('packages', {}).get('telamon', '')}".strip() if environment else "",
    ]
    return f"<header><h1>{escape(name)}</h1><p>{escape(' · '.join(fact for fact in facts if fact))}</p></header>"


def _tiles(summary: Mapping[str, Any]) -> str:
    val, gzip, beat = (summary.get(key) for key in ("val_bits_per_byte", "gzip_bits_per_byte", "seconds_to_beat_gzip"))
    tiles = []
    if val is not None:
        beside = "" if gzip is None else f"gzip -9 needs {gzip:.3f}"
        tiles.append(("Validation", f"{val:.3f}", "bits/byte", beside, gzip is not None and val < gzip))
    if gzip is not None:
        tiles.append(("Below gzip after", "not yet" if beat is None else human_seconds(beat), "", "of the process", beat is not None))
    if summary.get("final_loss") is not None:
        tiles.append(("Final loss", f"{summary['final_loss']:.3f}", "nats/token", "", False))
    if summary.get("val_mtp_acceptance") is not None:
        tiles.append(("Drafts accepted", f"{100 * summary['val_mtp_acceptance']:.1f}", "%", "of the token after the next", False))
    if summary.get("tokens_per_second") is not None:
        tiles.append(("Speed", f"{summary['tokens_per_second']:,.0f}", "tokens/s", "after the first step", False))
    if summary.get("mfu") is not None:
        tiles.append(("Share of peak", f"{100 * summary['mfu']:.1f}", "%", "MFU", False))
    if summary:
        tiles.append(("Steps", f"{summary['steps']:,}", "", f"in {human_seconds(summary['wall_seconds'])}", False))
    return '<section class="tiles">' + "".join(map(_tile, tiles)) + "</section>"


def _tile(tile: tuple[str, str, str, str, bool]) -> str:
    title, figure, unit, note, good = tile
    unit = f" <small>{escape(unit)}</small>" if unit else ""
    return f'<div class="tile{" good" if good else ""}"><h2>{escape(title)}</h2><p>{escape(figure)}{unit}</p><em>{escape(note)}</em></div>'


def _charts(lines: Sequence[Mapping[str, Any]], gzip: float | None) -> list[str]:
    def points(key: str, scale: float = 1.0) -> list[tuple[float, float]]:
        return [(line["step"], math.nan if line[key] is None else scale * line[key]) for line in lines if key in line]

    def train(key: str, *, smooth: bool = False, scale: float = 1.0) -> Series:
        return Series("training", points(key, scale), "train", smooth=smooth)

    def logged(key: str) -> bool:
        return any(key in line for line in lines)

    def validation(key: str) -> Series:
        return Series("validation", points(key), "validation", markers=True)

    reference = None if gzip is None else Reference(f"gzip -9: {gzip:.3f}", gzip)
    bits = [train("bits_per_byte", smooth=True), validation("val_bits_per_byte")]
    accepted = [validation("val_mtp_acceptance")] if logged("val_mtp_acceptance") else []
    # With further terms in the loss, the cross-entropy is what a validation loss compares with.
    loss = [train("cross_entropy" if logged("cross_entropy") else "loss", smooth=True), validation("val_loss")]
    loads = [Series("busiest", points("expert_load_max"), "train"), Series("idlest", points("expert_load_min"), "validation")]
    return [
        line_chart("Bits per byte of text", bits, reference=reference, wide=True),
        line_chart("Loss", loss, unit="nats/token"),
        line_chart("Learning rate", [train("learning_rate")]),
        line_chart("Norm of the gradient", [train("grad_norm", smooth=True)], unit="before clipping"),
        line_chart("Speed", [train("tokens_per_second")], unit="tokens/s", from_zero=True),
        line_chart("Share of the devices' peak", [train("mfu", scale=100)], unit="%", from_zero=True),
        *([line_chart("Load of experts", loads, unit="of the mean", from_zero=True)] if logged("expert_load_max") else []),
        *(line_chart("Drafts of multi-token prediction accepted", [series], unit="share", from_zero=True) for series in accepted),
        line_chart("Waiting for data", [train("data_wait", scale=100)], unit="% of the time", from_zero=True),
    ]


def _samples(text: str | None) -> str:
    return f"<section><h2>Samples</h2><pre>{escape(text)}</pre></section>" if text else ""


def _config(text: str | None) -> str:
    if not text:
        return ""
    rows = _flatten(yaml.safe_load(text) or {})
    return f"<details><summary>Config</summary>{_table(rows)}</details>"


def _data(report: Mapping[str, Any]) -> str:
    return f"<details><summary>Data</summary>{_table(_flatten(report))}</details>" if report else ""


def _environment(environment: Mapping[str, Any]) -> str:
    if not environment:
        return ""
    shown = dict(environment)
    shown["command"] = " ".join(shown.get("command", []))
    if "memory_bytes" in shown:
        shown["memory"] = human_bytes(shown.pop("memory_bytes"))
    return f"<details><summary>Environment</summary>{_table(_flatten(shown))}</details>"


def _flatten(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, Mapping) and tree:
        return {key: value for name, part in tree.items() for key, value in _flatten(part, f"{path}.{name}" if path else str(name)).items()}
    if isinstance(tree, list) and any(isinstance(part, Mapping) for part in tree):
        return {key: value for i, part in enumerate(tree) for key, value in _flatten(part, f"{path}.{i}").items()}
    return {path: tree}


def _table(rows: Mapping[str, Any]) -> str:
    cells = (f"<tr><th>{escape(key)}</th><td>{escape('–' if value is None else str(value))}</td></tr>" for key, value in rows.items())
    return f"<table>{''.join(cells)}</table>"


_STYLE = """
:root { color-scheme: light dark; --page: #f6f6f4; --card: #ffffff; --ink: #1c1d1f; --soft: #62666d; --rule: #e3e3df;
  --train: #2868c7; --validation: #c2550a; --good: #1b7f4b; }
@media (prefers-color-scheme: dark) { :root { --page: #141517; --card: #1d1f22; --ink: #e9e9e6; --soft: #9da2aa; --rule: #313439;
  --train: #6ea8ff; --validation: #ffa056; --good: #5cc98f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { margin: 0; font-size: 26px; letter-spacing: -.01em; overflow-wrap: anywhere; }
header p { margin: 2px 0 0; color: var(--soft); }
h2 { font-size: 15px; margin: 0 0 10px; }
section { margin-top: 20px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; }
.tile, figure, details, pre { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile h2 { margin: 0; font-size: 13px; font-weight: 500; color: var(--soft); }
.tile p { margin: 2px 0 0; font-size: 24px; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile.good p { color: var(--good); }
.tile small { font-size: 13px; font-weight: 400; color: var(--soft); }
.tile em { font-style: normal; font-size: 13px; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 12px; }
figure.wide { grid-column: 1 / -1; }
figure { margin: 0; padding: 12px 14px 6px; }
figcaption { font-weight: 600; display: flex; gap: 8px; align-items: baseline; flex-wrap: wrap; }
.unit { color: var(--soft); font-weight: 400; font-size: 13px; }
.legend { margin-left: auto; font-weight: 400; font-size: 13px; color: var(--soft); }
.key { margin-left: 14px; }
.key::before { content: ""; display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px; vertical-align: 3px; background: currentColor; }
.key.train::before { background: var(--train); } .key.validation::before { background: var(--validation); }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 13px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--rule); fill: none; } .axis { stroke: var(--soft); fill: none; }
.reference { stroke: var(--ink); stroke-dasharray: 5 4; fill: none; } svg .reference-name { fill: var(--ink); }
.line path { fill: none; stroke-width: 2; stroke-linejoin: round; } .line path.faint { opacity: .4; stroke-width: 1; }
.train path { stroke: var(--train); } .validation path { stroke: var(--validation); } .validation circle { fill: var(--validation); }
pre { padding: 14px 16px; margin: 0; overflow-x: auto; font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap; }
details { margin-top: 12px; padding: 10px 16px; } summary { cursor: pointer; font-weight: 600; }
table { border-collapse: collapse; width: 100%; margin-top: 8px; font-size: 13px; }
th, td { text-align: left; padding: 3px 12px 3px 0; border-top: 1px solid var(--rule); vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 400; color: var(--soft); width: 34%; } td { font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
"""
