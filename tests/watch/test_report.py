"""The report stands alone, shows what the files say, and bears what is missing."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from telamon.watch.chart import Reference, Series, line_chart, running_mean, thin, ticks
from telamon.watch.environment import describe_environment, write_environment
from telamon.watch.report import write_report
from telamon.watch.summary import Summary, write_summary


@pytest.fixture
def run_dir(tmp_path):
    run = tmp_path / "stdlib-<night>"
    run.mkdir()
    noise = np.random.default_rng(0)
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(10, 1010, 10):
            loss = 3 + 5 * np.exp(-step / 150) + 0.1 * noise.normal()
            line = {
                "step": step,
                "loss": loss if step != 500 else None,
                "bits_per_byte": loss / 2.2,
                "learning_rate": 1e-3 * min(1, step / 100),
                "grad_norm": 0.5 + noise.random(),
                "tokens_per_second": 5300 + 100 * noise.normal(),
                "mfu": 0.38,
                "data_wait": 0.001,
            }
            file.write(json.dumps(line) + "\n")
            if step % 100 == 0:
                file.write(json.dumps({"step": step, "val_loss": loss + 0.1, "val_bits_per_byte": loss / 2.1}) + "\n")
    summary = Summary(
        steps=1000,
        final_loss=3.01,
        val_bits_per_byte=1.431,
        gzip_bits_per_byte=2.034,
        seconds_to_beat_gzip=127.0,
        wall_seconds=271.0,
        tokens_per_second=5312.0,
        mfu=0.381,
    )
    write_summary(run, summary)
    write_environment(run, describe_environment())
    (run / "config.yaml").write_text("train: {steps: 1000}\ndata:\n  sources: [{kind: stdlib, path: null}]\n")
    (run / "data.json").write_text(json.dumps({"files": 1700, "bytes": 31_000_000}))
    (run / "samples.txt").write_text("def main(args):\n    return a < b & c\n")
    return run


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.links, self.open, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "path", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_needs_no_network_and_no_script(run_dir):
    text = Path(write_report(run_dir)).read_text()
    page = Page()
    page.feed(text)
    assert page.links == [] and page.open == []
    assert "<script" not in text and "@import" not in text and "url(" not in text


def test_it_shows_figures_samples_config_and_environment(run_dir):
    page = Page()
    text = Path(write_report(run_dir)).read_text()
    page.feed(text)
    words = " ".join(page.words)
    for shown in (
        "stdlib-<night>",
        "1.431",
        "2.034",
        "2 min 07 s",
        "5,312",
        "38.1",
        "4 min 31 s",
        "return a < b & c",
        "data.sources.0.kind",
        "packages.jax",
    ):
        assert shown in words, shown
    assert text.count("<svg") == 7


def test_every_chart_is_well_formed(run_dir):
    for chart in re.findall(r"<svg.*?</svg>", Path(write_report(run_dir)).read_text(), re.DOTALL):
        ElementTree.fromstring(chart)
        assert "nan" not in chart and "inf" not in chart


def test_a_run_that_has_logged_nothing_still_gets_a_page(tmp_path):
    assert "<svg" not in Path(write_report(tmp_path)).read_text()


def test_a_loss_that_was_not_finite_is_left_out_of_the_curve(tmp_path):
    for name, line in (("with", '{"step": 2, "loss": null}\n'), ("without", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n' + line + '{"step": 3, "loss": 2.0}\n')
    with_null, without = (Path(write_report(tmp_path / name)).read_text() for name in ("with", "without"))
    assert with_null.replace("with<", "without<") == without


def test_the_gzip_line_lies_where_a_value_of_that_size_would():
    chart = line_chart("t", [Series("a", [(0, 1.0), (1, 3.0), (2, 2.0)], "train")], reference=Reference("gzip", 2.0))
    path = re.search(r'class="line train"><path d="M[^"]*L[\d.]+ ([\d.]+)"', chart)
    line = re.search(r'class="reference" d="M\d+ ([\d.]+)H', chart)
    assert path and line and path[1] == line[1]


def test_a_diverged_first_step_does_not_flatten_the_curve():
    points = [(0.0, 1e6)] + [(float(x), 2.0 - x / 200) for x in range(1, 200)]
    chart = line_chart("t", [Series("a", points, "train")])
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", chart.split('class="line')[1])]
    assert max(heights) - min(heights[1:]) > 150


@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0], [0.0, 0.0], [float("nan"), 1.0], [-1.0, 2.0], [1e-9, 2e-9], [1e9, 2e9]])
def test_odd_ranges_are_drawn(values):
    chart = line_chart("t", [Series("a", list(enumerate(values)), "train", smooth=True)])
    ElementTree.fromstring(re.search(r"<svg.*</svg>", chart, re.DOTALL)[0])  # pyright: ignore[reportOptionalSubscript]


def test_nothing_finite_is_no_chart():
    assert line_chart("t", [Series("a", [(0, float("nan"))], "train")]) == ""


def test_ticks_are_round_and_inside():
    assert ticks(0, 1000, 5) == [0, 200, 400, 600, 800, 1000]
    assert ticks(1.93, 2.61, 5) == pytest.approx([2.0, 2.2, 2.4, 2.6])


def test_thinning_keeps_the_mean_and_smoothing_keeps_a_straight_line():
    points = [(float(x), 3.0 * x) for x in range(1000)]
    few = thin(points, 100)
    assert len(few) == 100 and np.mean([y for _, y in few]) == pytest.approx(np.mean([y for _, y in points]))
    np.testing.assert_allclose(running_mean(points, 20), points)


def test_a_mixture_shows_its_load_and_a_loss_that_validation_compares_with(tmp_path):
    """Terms of the router are in `loss`, not in `val_loss`: the curve drawn is that of the cross-entropy."""
    steps = range(10, 60, 10)
    lines = [{"step": s, "loss": 9.0, "cross_entropy": 2.0, "expert_load_max": 1.5, "expert_load_min": 0.5} for s in steps]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + json.dumps({"step": 50, "val_loss": 2.5}) + "\n"
    )
    text = Path(write_report(tmp_path)).read_text()
    charts = {figure.split(" <")[0].strip(): figure for figure in text.split("<figcaption>")[1:]}
    assert any("Load of experts" in name and "busiest" in chart and "idlest" in chart for name, chart in charts.items())
    loss = next(chart for name, chart in charts.items() if name.startswith("Loss"))
    assert ">2.2</text>" in loss, "an axis from 2 to 2.5, and not to 9"
