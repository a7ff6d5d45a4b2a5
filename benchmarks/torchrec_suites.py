"""TorchRec's own sharding tests with our sharders in place of theirs, on CPU ranks over gloo.

    git clone https://github.com/meta-pytorch/torchrec && git -C torchrec checkout v2026.08.17.00
    python benchmarks/torchrec_suites.py torchrec

The checkout gives the tests (they are not in the wheel); the library under test is the installed one, so take
the tag whose test utilities are the wheel's.  Before a test module is loaded, the sharder classes that it
derives from are replaced by ours.  Most of these tests are written for GPUs and NCCL: they are made to run
all the same (the count of GPUs that decorators ask for is answered with 8, and the backend becomes gloo).
Examples with what has no meaning here (UVM, an unfused kernel for sharded tables, float16 tables) are
rejected, so a test of nothing else is reported as not applicable.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SUITES = (
    "test_model_parallel_gloo.py",
    "test_model_parallel_nccl.py",
    "test_sequence_model_parallel.py",
    "test_apply_optim_per_param.py",
    "test_dp_grad_sync_optout.py",
)

# Loaded by every interpreter that the tests start, as `sitecustomize`.
HOOK = """
import importlib.abc, importlib.machinery, os, sys

CHECKOUT = os.environ["RECSYS_TORCHREC_CHECKOUT"]
TESTS = ("torchrec.distributed.test_utils", "torchrec.distributed.tests")


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if not name.startswith(TESTS):
            return None
        replace_sharders()
        adapt_hypothesis(int(os.environ["RECSYS_TORCHREC_EXAMPLES"] or 0))
        package = sys.modules[name.rpartition(".")[0]]
        spec = importlib.machinery.PathFinder.find_spec(name, package.__path__)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader)
        return spec


class Loader(importlib.abc.Loader):
    def __init__(self, inner):
        self.inner = inner

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        import torch

        count, torch.cuda.device_count = torch.cuda.device_count, lambda: 8
        try:
            self.inner.exec_module(module)
        finally:
            torch.cuda.device_count = count
        adapt(module)


def replace_sharders():
    import torchrec.distributed as distributed

    if hasattr(distributed, "_recsys_replaced"):
        return
    distributed._recsys_replaced = True
    distributed.__path__.append(os.path.join(CHECKOUT, "torchrec", "distributed"))
    import torchrec.distributed.embedding as sequence
    import torchrec.distributed.embeddingbag as pooled

    from recsys_tpu.sharding.embedding_bag_collection import TpuEmbeddingBagCollectionSharder
    from recsys_tpu.sharding.embedding_collection import TpuEmbeddingCollectionSharder

    pooled.EmbeddingBagCollectionSharder = TpuEmbeddingBagCollectionSharder
    sequence.EmbeddingCollectionSharder = TpuEmbeddingCollectionSharder


def adapt(module):
    name = module.__name__.rsplit(".", 1)[1]
    if name == "multi_process":
        base = module.MultiProcessTestBase
        run = base._run_multi_process_test

        def run_on_gloo(self, *arguments, **options):
            if "backend" in options:
                options["backend"] = "gloo"
            return run(self, *arguments, **options)

        base._run_multi_process_test = run_on_gloo
        # Ranks are forked from a process that has imported what they need, not started anew.
        import multiprocessing

        multiprocessing.set_forkserver_preload(
            [
                "torchrec.distributed.test_utils.test_sharding",
                "torchrec.distributed.tests.test_sequence_model",
            ]
        )
    if name == "test_model_parallel":
        shared = module.ModelParallelTestShared
        set_up = shared.setUp

        def set_up_on_cpu(self, *arguments, **options):
            self.skipTest = lambda reason: None
            try:
                set_up(self, *arguments, **options)
            finally:
                del self.skipTest

        shared.setUp = set_up_on_cpu
        build = shared._build_tables_and_groups

        def build_supported(self, data_type=module.DataType.FP32):
            if data_type not in (module.DataType.FP32, module.DataType.BF16):
                import hypothesis

                hypothesis.reject()
            build(self, data_type=data_type)

        shared._build_tables_and_groups = build_supported
    if name in ("test_sharding", "test_sequence_model"):
        for sharder in ("TestEBCSharder", "TestEmbeddingCollectionSharder"):
            if hasattr(module, sharder):
                reject_other_kernels(getattr(module, sharder))


def reject_other_kernels(sharder):
    make = sharder.__init__

    def checked(self, sharding_type, kernel_type, *arguments, **options):
        import multiprocessing

        wanted = "dense" if sharding_type == "data_parallel" else "fused"
        if kernel_type != wanted and multiprocessing.parent_process() is None:
            import hypothesis

            hypothesis.reject()
        make(self, sharding_type, kernel_type, *arguments, **options)

    sharder.__init__ = checked
    ours = [base for base in sharder.__mro__ if base.__module__.startswith("recsys_tpu.")]
    assert ours, f"{sharder} is not derived from our sharder"


def adapt_hypothesis(most):
    from hypothesis import HealthCheck, settings

    if hasattr(settings, "_recsys_replaced"):
        return
    settings._recsys_replaced = True
    make = settings.__init__

    def adapted(self, *arguments, **options):
        if most and "max_examples" in options:
            options["max_examples"] = min(options["max_examples"], most)
        # Tests that a class inherits run in one process with its parent's, which pytest would allow.
        options.setdefault("suppress_health_check", list(HealthCheck))
        make(self, *arguments, **options)

    settings.__init__ = adapted


sys.meta_path.insert(0, Finder())
"""


# Runs one module of unittest and writes a line for each test: name, outcome, why.
RUNNER = """
import json, sys, unittest

NOT_OURS = "only kernels or data types that we do not offer"


class Lines(unittest.TestResult):
    def write(self, test, outcome, why=""):
        with open(sys.argv[2], "a") as report:
            name = ".".join(test.id().split(".")[-2:])
            report.write(json.dumps([name, outcome, " ".join(why.split())[-400:]]) + "\\n")

    def addSuccess(self, test):
        self.write(test, "passed")

    def addSkip(self, test, reason):
        self.write(test, "skipped", reason)

    def addFailure(self, test, error):
        if "Unsatisfiable" in error[0].__name__:
            return self.write(test, "not applicable", NOT_OURS)
        self.write(test, "failed", f"{error[0].__name__}: {error[1]}"[-1500:])

    addError = addFailure


def tests_of(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from tests_of(test)
        elif any(part in test.id() for part in sys.argv[3].split("|")):
            yield test


if __name__ == "__main__":
    found = unittest.defaultTestLoader.loadTestsFromName(sys.argv[1])
    unittest.TestSuite(list(tests_of(found))).run(Lines())
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a checkout of TorchRec")
    parser.add_argument("--suites", nargs="+", default=SUITES)
    parser.add_argument(
        "--select", default=None, help="only tests whose names have one of these parts: rw|cw"
    )
    parser.add_argument("--examples", type=int, help="at most so many hypothesis examples of a test")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds a suite may take")
    arguments = parser.parse_args()
    tests = arguments.checkout.resolve() / "torchrec" / "distributed" / "tests"
    if not tests.is_dir():
        parser.error(f"{arguments.checkout} is no checkout of TorchRec: it has no torchrec/distributed/tests")
    totals: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
        (Path(folder) / "run_suite.py").write_text(RUNNER, encoding="utf-8")
        for suite in arguments.suites:
            began = time.perf_counter()
            outcomes = run(tests / suite, Path(folder), arguments)
            print(f"{suite}: {len(outcomes)} tests, {time.perf_counter() - began:.0f} s")
            for name, outcome, why in outcomes:
                totals[outcome] += 1
                print(f"  {outcome:15} {name}{': ' + why if why else ''}")
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(totals.items())))
    raise SystemExit(bool(totals["failed"]))


def run(suite: Path, folder: Path, arguments: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(test, outcome, why) of one file."""
    report = folder / f"{suite.stem}.json"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}",
        "RECSYS_TORCHREC_EXAMPLES": str(arguments.examples or ""),
        "RECSYS_TORCHREC_CHECKOUT": str(arguments.checkout.resolve()),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    # By its module name: the file must be loaded as part of TorchRec.
    name = f"torchrec.distributed.tests.{suite.stem}"
    command = [sys.executable, str(folder / "run_suite.py"), name, str(report), arguments.select or ""]
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, timeout=arguments.timeout, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        finished = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
        why = f"not done in {arguments.timeout} s"
        return [*map(tuple, finished), (suite.stem, "failed", why)]
    if done.returncode:
        return [(suite.stem, "failed", (done.stdout + done.stderr)[-2000:])]
    return [tuple(json.loads(line)) for line in report.read_text().splitlines()]


if __name__ == "__main__":
    main()
