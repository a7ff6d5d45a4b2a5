"""A checkpoint as one plain state_dict: `python -m recsys_tpu.unshard CHECKPOINT model.pt`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from recsys_tpu.errors import run_command

_EXAMPLES = """examples:
  python -m recsys_tpu.unshard runs/dlrm/checkpoints/step_00001954 model.pt
  python -m recsys_tpu.unshard runs/dlrm/checkpoints/step_00001954 all.pt --optimizer

Load the first with model.load_state_dict(torch.load("model.pt")), model being the unsharded module; start a
run from either with train.start_from=model.pt.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recsys_tpu.unshard",
        description="Write a checkpoint as a state_dict of whole tensors, which torch and TorchRec load.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="folder step_N of a run")
    parser.add_argument("output", type=Path, help="file to write")
    parser.add_argument("--optimizer", action="store_true", help="with the optimizer's state")
    arguments = parser.parse_args()
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # no device is needed

    import torch

    from recsys_tpu.plain_state import read_checkpoint

    content = read_checkpoint(arguments.checkpoint)
    torch.save(content if arguments.optimizer else content["model"], arguments.output)
    elements = sum(value.numel() for value in content["model"].values())
    print(f"{arguments.output}: {len(content['model'])} tensors of the model, {elements:,} values")


if __name__ == "__main__":
    run_command(main)
