"""Train a model: `python -m recsys_tpu.train --config configs/dlrm.yaml [key=value ...]`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from recsys_tpu.config import load_config
from recsys_tpu.errors import ConfigError, run_command
from recsys_tpu.quiet import quiet_libraries
from recsys_tpu.runtime.activation import activate

_EXAMPLES = """examples:
  python -m recsys_tpu.train --config configs/dlrm.yaml
  python -m recsys_tpu.train --config configs/dlrm.yaml train.max_steps=100 model.over_mlp=[64,32]
  python -m recsys_tpu.train --config configs/dlrm.yaml train.resume=auto
  python -m recsys_tpu.train --config configs/criteo_sample.yaml data.path=/data/criteo
  python -m recsys_tpu.train --config configs/dlrm.yaml runtime.device=tpu-emulated
  torchrun --nproc-per-node 2 -m recsys_tpu.train --config configs/dlrm.yaml
  python -m recsys_tpu.train --config configs/criteo_1tb_dlrm_dcnv2.yaml --dry-run --topology v6e:8x8

Every key of the config can be given as section.key=value; an unknown key is an error that names the
nearest one. The resolved config is written to <run.output_dir>/<run.name>/config.yaml.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recsys_tpu.train",
        description="Train a recommendation model.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides of the config")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check shapes, plan and memory and compile the step for --topology; no data, no chips",
    )
    parser.add_argument(
        "--topology",
        action="append",
        metavar="SLICE",
        help="with --dry-run: such as v6e:8x8; may be given more than once",
    )
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides)
    if arguments.dry_run:
        from recsys_tpu.dry_run import dry_run

        if not arguments.topology:
            raise ConfigError("--dry-run needs --topology, such as --topology v6e:8x8")
        environment = dict(os.environ)
        activate("cpu", compile_cache=config.runtime.compile_cache)
        quiet_libraries()
        dry_run(config, arguments.topology, Console(highlight=False), environment=environment)
        return
    if arguments.topology:
        raise ConfigError("--topology goes with --dry-run; a run takes sharding.topology=SLICE")
    activate(
        config.runtime.device, compile_cache=config.runtime.compile_cache
    )  # before anything imports torch

    from recsys_tpu.runtime import Runtime
    from recsys_tpu.trainer import Trainer

    quiet_libraries()

    runtime = Runtime.start(config.runtime)
    try:
        trainer = Trainer(config, runtime)
        try:
            trainer.run()
        finally:
            trainer.close()
    finally:
        runtime.close()


if __name__ == "__main__":
    run_command(main)
