"""The default run without a network: once the packages are installed, nothing more is fetched."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

SHORT = ["train.steps=3", "train.batch_size=4", "train.seq_len=32", "eval.every=none", "eval.batches=1", "sample.tokens=4"]


def no_routes():
    """The command that runs another in a network namespace without routes, where that is allowed; else none."""
    command = [shutil.which("unshare") or "unshare", "--net"]
    try:
        return command if subprocess.run([*command, "true"], capture_output=True).returncode == 0 else None
    except OSError:
        return None


def closed_port():
    """A port of this machine that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_the_default_run_works_with_the_network_unreachable(tmp_path):
    """Proxies point at a closed port, and where the system allows it there are no routes either. All caches are empty."""
    nowhere = f"http://127.0.0.1:{closed_port()}"
    names = ("http_proxy", "https_proxy", "all_proxy")
    proxies = {name: nowhere for small in names for name in (small, small.upper())}
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "xdg"), "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [*(no_routes() or []), sys.executable, "-m", "telamon", "train", "default", "run.name=one", *SHORT],
        cwd=tmp_path,
        env={**os.environ, **proxies, **home, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "runs/one/summary.json").read_text())
    assert summary["steps"] == 3 and summary["val_bits_per_byte"] > 0 and summary["gzip_bits_per_byte"] > 0
    assert "def main(" in (tmp_path / "runs/one/samples.txt").read_text()
    assert (tmp_path / "runs/one/report.html").exists()
