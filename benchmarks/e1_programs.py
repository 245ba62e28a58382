"""The kernels in a mixture's training step that a machine's own compiler made without the machine; a process for each, as compilers want it."""

import json
import re
import sys
from collections import Counter

RUN = "benchmarks/runs/e1.yml"


def kernels_in(text: str) -> dict[str, int]:
    """How often each kernel is called in a compiled program, by its name without sizes: on TPUs, and Mosaic's and cuDNN's on GPUs."""
    found: Counter[str] = Counter()
    for name, target, rest in re.findall(r'%([\w.$-]+) = [^\n]*?custom_call_target="([^"]+)"([^\n]*)', text):
        if target == "tpu_custom_call":
            found[re.split(r"-g_|_bt_|\.\d+$", name)[0]] += 1
        elif target.startswith("mosaic_gpu"):
            named = re.search(r'op_name="[^"]*?(\w+)/(?:mpmd_map|pallas_call)"', rest)
            found[named[1] if named else target] += 1
        elif target.startswith("__cudnn"):
            found[target] += 1
    return dict(sorted(found.items()))


def main(topology: str) -> None:
    """Print what was picked and which kernels were found, as a line of JSON."""
    import jax

    from telamon.config.load import load_run
    from telamon.kernels.picks import noted
    from telamon.plan.topology import aot_devices, parse_topology
    from telamon.train.job import make_job

    config = load_run(RUN).config
    job = make_job(config, devices=aot_devices(parse_topology(topology)))
    with jax.sharding.use_abstract_mesh(job.mesh.abstract_mesh), noted() as picks:
        text = job.lowered("train", config.train.batch_size).compile().as_text()
    print(json.dumps({"picks": [str(pick) for pick in picks], "kernels": kernels_in(text)}))


if __name__ == "__main__":
    main(sys.argv[1])
