"""Train a model: `python -m recsys_tpu.train --config configs/dlrm.yaml [key=value ...]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from recsys_tpu.config import load_config
from recsys_tpu.errors import run_command
from recsys_tpu.quiet import quiet_libraries
from recsys_tpu.runtime.activation import activate

_EXAMPLES = """examples:
  python -m recsys_tpu.train --config configs/dlrm.yaml
  python -m recsys_tpu.train --config configs/dlrm.yaml train.max_steps=100 model.over_mlp=[64,32]
  python -m recsys_tpu.train --config configs/dlrm.yaml train.resume=auto
  python -m recsys_tpu.train --config configs/criteo_sample.yaml data.path=/data/criteo
  python -m recsys_tpu.train --config configs/dlrm.yaml runtime.device=tpu-emulated
  torchrun --nproc-per-node 2 -m recsys_tpu.train --config configs/dlrm.yaml

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
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
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
