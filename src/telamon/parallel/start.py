"""Start-up of a run's processes."""

import os

import jax

from telamon.errors import PeerError
from telamon.parallel.peers import watch_peers

_CLUSTER_SIGNS = ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST", "TPU_WORKER_HOSTNAMES", "CLOUD_TPU_TASK_ID")


def keep_programs(folder: str | None) -> None:
    """Keep compiled programs in a folder (or at a URL) for later starts, unless the environment has said where already; None: nowhere."""
    if folder is not None and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", folder)


def start_processes() -> None:
    """Join the other processes of the run, where there are any; call before the first use of a device.

    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` give explicit addresses; under Slurm, MPI, GKE and
    on TPU pods JAX finds them itself. A single process needs nothing.

    Raises:
        PeerError: the others cannot be reached.
    """
    if jax.distributed.is_initialized():
        return
    explicit = os.environ.get("JAX_COORDINATOR_ADDRESS")
    several = int(os.environ.get("SLURM_NTASKS", os.environ.get("OMPI_COMM_WORLD_SIZE", "2"))) > 1
    detected = several and any(sign in os.environ for sign in _CLUSTER_SIGNS) and os.environ.get("TELAMON_SINGLE_PROCESS") != "1"
    if not explicit and not detected:
        return
    try:
        if explicit:
            jax.distributed.initialize(
                coordinator_address=explicit,
                num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
                process_id=int(os.environ["JAX_PROCESS_ID"]),
            )
        else:
            jax.distributed.initialize()
    except (KeyError, ValueError) as error:
        raise PeerError(
            f"JAX_COORDINATOR_ADDRESS={explicit} also needs JAX_NUM_PROCESSES and JAX_PROCESS_ID as numbers ({error})"
        ) from error
    except RuntimeError as error:
        raise PeerError(f"could not join the other processes ({explicit or 'detected cluster'}): {error}") from error
    watch_peers()
