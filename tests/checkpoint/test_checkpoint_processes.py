"""Two real processes on loopback write one checkpoint together and agree on which to restore."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
from checkpoint_peer import state_of
from checkpoint_states import abstract, assert_same, mesh

from telamon.checkpoint.store import CheckpointStore

PEER = Path(__file__).with_name("checkpoint_peer.py")


def test_two_processes_save_together_and_agree_on_the_newest_whole_one(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    commands = [[sys.executable, str(PEER), str(tmp_path), str(port), str(index)] for index in (0, 1)]
    peers = [subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    for peer in peers:
        out, errors = peer.communicate(timeout=90)
        assert peer.returncode == 0, errors
        found = [line for line in out.splitlines() if not line.startswith("[Gloo]")]
        assert found == ["latest 2", "meta 2", "shards True (256, 64)", "key True"]
    with CheckpointStore(tmp_path) as store:
        assert store.latest_valid() == 2
        want = state_of(2, mesh(fsdp=2))
        got, _ = store.restore(2, abstract(want, mesh(fsdp=1)))
    assert_same(jax.device_get(got), jax.device_get(want))
