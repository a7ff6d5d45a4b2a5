"""Run a torch_tpu script on an emulated `tpu` device: `python -m recsys_tpu.emulation script.py args...`"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from recsys_tpu import emulation


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recsys_tpu.emulation",
        description="Run a torch_tpu script with the tpu device emulated on this CPU.",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT names a module, not a file")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the script unchanged")
    options = parser.parse_args()
    if not options.module and not Path(options.script).is_file():
        parser.error(f"no such file: {options.script}")
    try:
        emulation.activate()
    except emulation.EmulationError as error:
        parser.exit(1, f"{error}\n")
    sys.argv = [options.script, *options.arguments]
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(options.script).resolve().parent)
        runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
