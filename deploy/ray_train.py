"""Start a run on every host of a TPU slice through Ray: one torchrun a host, one process a chip.

    python deploy/ray_train.py --hosts 16 --ranks-per-host 4 --topology 8,8,1 -- \\
        --config configs/criteo_1tb_dlrm_dcnv2.yaml train.resume=auto

Needs a Ray cluster (`ray start`) on the hosts of the slice, each with this package, the data and the same
working directory, and `pip install ray` here.  What each host does is what docs/running-on-tpu.md says to
type there.  `--device cpu` starts the same ranks without TPUs, on as few machines as there are: a trial.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_MASTER_PORT = 29_500


@dataclass(frozen=True)
class Host:
    """A bundle of the placement group and where it came to lie."""

    bundle: int
    worker: int
    """TPU_WORKER_ID: the place of the host in the slice."""
    address: str
    free_port: int


def find_host(bundle: int) -> Host:
    """Runs on each host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    worker = int(os.environ.get("TPU_WORKER_ID", bundle))
    return Host(bundle, worker, ray.util.get_node_ip_address(), port)


def run_host(number: int, addresses: Sequence[str], port: int, options: argparse.Namespace) -> int:
    """Runs on each host: torchrun with what torch_tpu must know of the slice; returns its exit status."""
    environment = os.environ | {"TPU_WORKER_HOSTNAMES": ",".join(addresses), "NODE_RANK": str(number)}
    if options.device == "tpu":
        environment |= {
            "TORCH_TPU_DEVICES_PER_HOST": str(options.ranks_per_host),
            "TORCH_TPU_TOPOLOGY": options.topology,
        }
        launch = [sys.executable, "-m", "torch_tpu._internal.distributed.distributed"]
        printed = subprocess.run(launch, env=environment, check=True, capture_output=True, text=True).stdout
        environment |= dict(word.split("=", 1) for word in shlex.split(printed))
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", str(len(addresses)), "--node-rank", str(number)]
    command += ["--nproc-per-node", str(options.ranks_per_host)]
    command += ["--master-addr", addresses[0], "--master-port", str(port)]
    command += ["-m", "recsys_tpu.train", *options.arguments]
    return subprocess.run(command, env=environment, cwd=options.directory, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--ranks-per-host", type=int, required=True, help="chips; of tpu7x halves of them")
    parser.add_argument("--topology", help="of the whole slice, such as 8,8,1 (v6e-64) or 2,4,4 (v5p-64)")
    parser.add_argument("--device", choices=["tpu", "cpu"], default="tpu")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="working directory on every host")
    parser.add_argument("arguments", nargs="+", help="of recsys_tpu.train, after --")
    options = parser.parse_args()
    if options.device == "tpu" and not options.topology:
        parser.error("--device tpu needs --topology")

    ray.init(address=os.environ.get("RAY_ADDRESS"))
    resources = {"TPU": options.ranks_per_host, "CPU": 1} if options.device == "tpu" else {"CPU": 1}
    strategy = "STRICT_SPREAD" if options.device == "tpu" else "PACK"
    group = placement_group([resources] * options.hosts, strategy=strategy)
    ray.get(group.ready())

    def on_bundle(bundle: int) -> dict[str, object]:
        placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        others = {name: amount for name, amount in resources.items() if name != "CPU"}
        return {"scheduling_strategy": placed, "num_cpus": 1, "resources": others}

    probe, start = ray.remote(find_host), ray.remote(run_host)
    hosts = ray.get([probe.options(**on_bundle(bundle)).remote(bundle) for bundle in range(options.hosts)])
    hosts.sort(key=lambda host: host.worker)
    addresses = [host.address for host in hosts]
    port = _MASTER_PORT if options.device == "tpu" else hosts[0].free_port
    runs = [
        start.options(**on_bundle(host.bundle), max_retries=0).remote(number, addresses, port, options)
        for number, host in enumerate(hosts)
    ]
    statuses = ray.get(runs)
    print("exit status of each host:", statuses)
    sys.exit(max(statuses))


if __name__ == "__main__":
    main()
