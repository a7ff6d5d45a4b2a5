"""Fuzz the parser of Criteo logs and the loaders of configs, plans and checkpoint manifests.

    python benchmarks/fuzz.py --minutes 10 log config plan manifest

Each target runs for `--minutes`.  A log is compared with a plain Python parser row by row; a loader must
return or raise its own error, nothing else.  The first failure is shrunk, printed and ends the command.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent))

from recsys_tpu.config import Config, dump_config, load_config
from recsys_tpu.data.criteo.diagnose import MAX_DIGITS
from recsys_tpu.data.criteo.parse import parse_block
from recsys_tpu.errors import CheckpointError, ConfigError

_ROUND_EXAMPLES = 300

# ---- logs

_COUNT = re.compile(rb"-?[0-9]+")
_HASH = re.compile(rb"[0-9a-fA-F]{8}")
_good_count = st.integers(-(10**MAX_DIGITS) + 1, 10**MAX_DIGITS - 1).map(lambda n: str(n).encode())
_odd = st.one_of(
    st.binary(max_size=20),
    st.sampled_from(
        [b"-", b"--1", b"+1", b"1e3", b" 1", b"0x12", b"nan", b"-0", b"00000000000000000", b"\r"]
    ),
    st.text("0123456789abcdefABCDEFgG-+. ", max_size=18).map(str.encode),
)
_good_hash = st.integers(0, 2**32 - 1).map(lambda n: f"{n:08x}".encode())
_count = st.one_of(st.just(b""), _good_count, _good_count, _good_count)
_hash = st.one_of(st.just(b""), _good_hash, _good_hash, _good_hash)


@st.composite
def _line(draw: st.DrawFn, labelled: bool) -> bytes:
    fields = [draw(st.sampled_from([b"0", b"1"]))] if labelled else []
    fields += [draw(_count) for _ in range(13)] + [draw(_hash) for _ in range(26)]
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(fields) - 1))
        match draw(st.sampled_from(["change", "drop", "add"])):
            case "change":
                fields[at] = draw(_odd)
            case "drop":
                del fields[at]
            case _:
                fields.insert(at, draw(_odd))
    return b"\t".join(fields) + draw(st.sampled_from([b"", b"", b"\r"]))


@st.composite
def _block(draw: st.DrawFn) -> tuple[bool, bytes]:
    labelled = draw(st.booleans())
    lines = draw(st.lists(st.one_of(_line(labelled), _line(labelled), st.binary(max_size=300)), max_size=6))
    return labelled, b"".join(line + b"\n" for line in [*lines, draw(_line(labelled))])


def _valid(line: bytes, labelled: bool) -> tuple[int, list[int | None], list[int | None]] | None:
    """(label, counts, hashes) by the plain rules, or None for a bad row."""
    fields = line.split(b"\t")
    if len(fields) != 39 + labelled:
        return None
    label = -1
    if labelled:
        if fields[0] not in (b"0", b"1"):
            return None
        label = int(fields.pop(0))
    counts: list[int | None] = []
    for text in fields[:13]:
        if text and (not _COUNT.fullmatch(text) or len(text.lstrip(b"-")) > MAX_DIGITS):
            return None
        counts.append(int(text) if text else None)
    hashes: list[int | None] = []
    for text in fields[13:]:
        if text and not _HASH.fullmatch(text):
            return None
        hashes.append(int(text, 16) if text else None)
    return label, counts, hashes


def check_log(case: tuple[bool, bytes]) -> None:
    """The vectorised parser and the plain one agree on every line."""
    labelled, text = case
    lines = [line.removesuffix(b"\r") for line in text.split(b"\n")[:-1]]
    expected = [_valid(line, labelled) for line in lines]
    parsed = parse_block(text, first_line=1, labelled=labelled)
    bad = [number for number, row in enumerate(expected, start=1) if row is None]
    assert [row.line for row in parsed.bad] == bad, (bad, parsed.bad)
    good = [row for row in expected if row is not None]
    assert parsed.rows.labels.tolist() == [label for label, _, _ in good]
    for values, missing, which in (
        (parsed.rows.counts, parsed.rows.counts_missing, 1),
        (parsed.rows.hashes, parsed.rows.hashes_missing, 2),
    ):
        for column in range(values.shape[0]):
            wanted = [row[which][column] for row in good]  # type: ignore[index]
            assert missing[column].tolist() == [value is None for value in wanted]
            assert values[column].tolist() == [value or 0 for value in wanted]


# ---- loaders

_scalar = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["auto", "cpu", "dlrm", "sgd", "1e-3", "..", "v5p", "table_wise", "float32"]),
)
_value = st.recursive(
    _scalar,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


def _mutations(tree: Any) -> st.SearchStrategy[Any]:
    """`tree` with one to three of its nodes replaced, removed or doubled."""

    @st.composite
    def mutated(draw: st.DrawFn) -> Any:
        result = json.loads(json.dumps(tree))
        for _ in range(draw(st.integers(1, 3))):
            node = result
            while True:
                keys = list(node) if isinstance(node, dict) else list(range(len(node)))
                if not keys:
                    break
                key = draw(st.sampled_from(keys))
                if isinstance(node[key], dict | list) and node[key] and draw(st.integers(0, 3)):
                    node = node[key]
                    continue
                match draw(st.sampled_from(["replace", "remove", "add"])):
                    case "replace":
                        node[key] = draw(_value)
                    case "remove":
                        del node[key]
                    case _ if isinstance(node, list):
                        node.append(node[key])
                    case _:
                        node[draw(st.text(max_size=6))] = draw(_value)
                break
        return result

    return mutated()


def _texts(tree: Any) -> st.SearchStrategy[bytes]:
    """Files made of `tree`: changed trees as YAML or JSON, whole files with bytes changed, and noise."""
    whole = yaml.safe_dump(tree).encode()

    @st.composite
    def spoiled(draw: st.DrawFn) -> bytes:
        text = bytearray(whole)
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, len(text) - 1))
            text[at : at + draw(st.integers(0, 30))] = draw(st.binary(max_size=8))
            text = text or bytearray(b"\n")
        return bytes(text)

    as_yaml = _mutations(tree).map(lambda t: yaml.safe_dump(t).encode())
    as_json = _mutations(tree).map(lambda t: json.dumps(t).encode())
    return st.one_of(as_yaml, as_json, spoiled(), st.binary(max_size=60))


def _check_config(path: Path) -> None:
    try:
        config = load_config(path)
    except ConfigError as error:
        assert str(path) in str(error)
        return
    path.write_text(dump_config(config))
    assert load_config(path) == config, "a config changed when written and read"


def _plan_tree() -> Any:
    from recsys_tpu.sharding.planner.make import make_plan
    from recsys_tpu.sharding.planner.tables import TableSpec, Workload
    from recsys_tpu.sharding.planner.topology import emulated

    tables = tuple(
        TableSpec(name=f"t{i}", rows=1000 * (i + 1), dim=16, pooling_factors=(1.0,)) for i in range(4)
    )
    return make_plan(Workload(tables=tables, batch_per_rank=64), emulated(4)).to_dict()


def _check_plan(path: Path) -> None:
    from recsys_tpu.sharding.planner.errors import PlanError
    from recsys_tpu.sharding.planner.plan import Plan

    try:
        plan = Plan.load(path)
    except PlanError as error:
        assert str(error)
        return
    assert list(plan.shards()), "a plan without shards was accepted"
    assert Plan.from_dict(plan.to_dict()) == plan, "a plan changed when written and read"


_MANIFEST = {
    "format_version": 1,
    "files": {"__0_0.distcp": {"bytes": 4, "sha256": "ab" * 32}, "tensors.json": {"bytes": 9, "sha256": "x"}},
}
_TENSORS = {
    "model.weight": {
        "dtype": "float32",
        "size": [4, 2],
        "chunks": [{"offsets": [0, 0], "sizes": [4, 2], "file": "__0_0.distcp", "position": 0, "bytes": 400}],
    }
}


def _check_manifest(path: Path) -> None:
    from recsys_tpu.checkpoint_storage import MANIFEST_FILE, TENSORS_FILE, damage, saved_shapes

    content = path.read_bytes()
    for name, read in ((MANIFEST_FILE, damage), (TENSORS_FILE, saved_shapes)):
        (path.parent / name).write_bytes(content)
        try:
            read(path.parent)
        except CheckpointError as error:
            assert str(error)


# ---- the command


def _targets(folder: Path) -> dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], None]]]:
    def on_file(check: Callable[[Path], None], name: str) -> Callable[[bytes], None]:
        def run(content: bytes) -> None:
            path = folder / name
            path.write_bytes(content)
            check(path)

        return run

    config = Config().model_dump(mode="json")
    return {
        "log": (_block(), check_log),
        "config": (_texts(config), on_file(_check_config, "config.yaml")),
        "plan": (_texts(_plan_tree()), on_file(_check_plan, "plan.yaml")),
        "manifest": (
            st.one_of(_texts(_MANIFEST), _texts(_TENSORS)),
            on_file(_check_manifest, "manifest.json"),
        ),
    }


def fuzz(
    strategy: st.SearchStrategy[Any], check: Callable[[Any], None], seconds: float, first_seed: int
) -> int:
    """Check examples for `seconds`; returns how many. Raises what the first bad one raises."""
    until = time.monotonic() + seconds
    examples = 0

    def counted(case: Any) -> None:
        nonlocal examples
        examples += 1
        check(case)

    number = first_seed
    while time.monotonic() < until:
        test = given(strategy)(counted)
        test = settings(
            max_examples=_ROUND_EXAMPLES,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )(seed(number)(test))
        test()
        number += 1
    return examples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", help="log, config, plan, manifest; default: all")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        targets = _targets(Path(folder))
        for name in arguments.targets or targets:
            if name not in targets:
                parser.error(f"no target {name!r}; there are {', '.join(targets)}")
            strategy, check = targets[name]
            examples = fuzz(strategy, check, 60 * arguments.minutes, arguments.seed)
            print(f"{name}: {examples:,} examples in {arguments.minutes:g} min, no failure", flush=True)


if __name__ == "__main__":
    main()
