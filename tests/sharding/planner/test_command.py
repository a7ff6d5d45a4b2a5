"""The command line, plan files, explanations, infeasible messages, and the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from recsys_tpu.plan import main
from recsys_tpu.sharding.planner import (
    DensePart,
    InfeasibleError,
    Plan,
    PlanDriftError,
    PlanInputError,
    ShardingType,
    TableConstraint,
    TableSpec,
    Topology,
    Workload,
    estimate,
    make_plan,
    parse_topology,
)
from recsys_tpu.sharding.planner.chips import CHIPS
from recsys_tpu.sharding.planner.costs import CostModel
from recsys_tpu.sharding.planner.inputs import read_workload
from recsys_tpu.sharding.planner.scale import parse_chips, sizes
from tests.sharding.planner.strategies import small_topology

CONFIG = {
    "model": {
        "embedding_dim": 32,
        "num_embeddings": {"C1": 4_000_000, "C2": 500, "C3": 90_000, "C4": 12},
        "bottom_mlp": [64],
        "over_mlp": [64],
    },
    "optimizer": {"sparse": {"kind": "adagrad"}},
    "train": {"batch_size": 4096},
    "plan": {"pooling_factors": {"C1": 20}},
}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of the report are not wrapped."""
    monkeypatch.setenv("COLUMNS", "250")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def _run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    main([str(word) for word in words])
    return re.sub(r"\s+", " ", capsys.readouterr().out)


def _made(config: Path, capsys: pytest.CaptureFixture[str], name: str, *words: object) -> Path:
    path = config.parent / name
    _run(capsys, "--config", config, "--topology", "v6e:2x4", "--output", path, *words)
    return path


def test_the_command_writes_a_plan_that_says_what_it_assumed(config, capsys):
    out = _run(capsys, "--config", config, "--topology", "v6e:2x4", "--output", config.parent / "plan.json")
    assert "4 tables on v6e:2x4 (8 ranks)" in out
    assert "Assumed for 4 of 4 tables: all rows equally likely" in out
    assert "not measurements" in out
    plan = Plan.load(config.parent / "plan.json")
    assert {table.name for table in plan.tables} == {"t_C1", "t_C2", "t_C3", "t_C4"}


@pytest.mark.parametrize("name", ["plan.json", "plan.yaml"])
def test_a_plan_file_reads_back_equal(config, capsys, name):
    plan = Plan.load(_made(config, capsys, name))
    plan.save(config.parent / f"again-{name}")
    assert Plan.load(config.parent / f"again-{name}") == plan


def test_a_plan_file_without_a_table_or_a_column_is_refused(config, capsys):
    path = _made(config, capsys, "plan.json")
    tree = json.loads(path.read_text())
    tree["tables"][0]["column_shards"][0][1] -= 8
    path.write_text(json.dumps(tree))
    with pytest.raises(
        PlanInputError, match=r"plan\.json: table t_C1: column shards cover \d+ of 32 columns"
    ):
        Plan.load(path)


def _workload(rows: int = 1000, *, names: str = "ab") -> Workload:
    specs = tuple(TableSpec(name=name, rows=rows, dim=16, pooling_factors=(2.0,)) for name in names)
    return Workload(tables=specs, batch_per_rank=64, dense=DensePart())


def test_drift_says_everything_that_changed():
    plan = make_plan(_workload(), small_topology(2))
    with pytest.raises(PlanDriftError) as caught:
        plan.check_fits(replace(_workload(2000, names="ac"), batch_per_rank=32), small_topology(4))
    for change in (
        "table a: rows was 1,000, is 2,000",
        "table c is not in the plan",
        "table b of the plan is not in the model",
        "topology: shape was [2], is [4]",
        "batch_per_rank: was 64, is 32",
    ):
        assert change in str(caught.value)


def test_diff_lists_only_what_changed(config, capsys):
    old = _made(config, capsys, "old.json")
    tree = {**CONFIG, "plan": {**CONFIG["plan"], "constraints": {"t_C3": {"types": ["row_wise"]}}}}
    config.write_text(yaml.safe_dump(tree))
    new = _made(config, capsys, "new.json")
    out = _run(capsys, "diff", old, new)
    assert re.search(r"t_C3 │ .* row_wise on all ranks", out)
    assert "0 changed" in _run(capsys, "diff", old, old)


def test_explain_says_why_not_for_every_type(config, capsys):
    plan = _made(config, capsys, "plan.json")
    out = _run(capsys, "explain", "t_C1", "--plan", plan, "--config", config)
    for kind in ShardingType:
        assert kind.value in out
    assert "the plan's choice" in out


@pytest.mark.parametrize(
    ("types", "given"),
    [
        ({"types": ["column_wise"], "ranks": [1, 3, 5]}, {1, 3, 5}),
        ({"types": ["table_wise"], "pinned": [6]}, {6}),
        ({"types": ["table_row_wise"]}, set(range(8))),
    ],
)
def test_constraints_hold(config, capsys, types, given):
    config.write_text(yaml.safe_dump({**CONFIG, "plan": {"constraints": {"t_C1": types}}}))
    plan = Plan.load(_made(config, capsys, "plan.json"))
    table = plan.table("t_C1")
    assert table.kind.value == types["types"][0]
    assert {shard.rank for shard in table.shards(8, plan.row_group)} <= given


def test_a_constraint_that_leaves_nothing_is_an_error():
    work = replace(_workload(), constraints={"a": TableConstraint(types=(ShardingType.GRID_SHARD,))})
    with pytest.raises(PlanInputError, match=r"table a \(1,000 x 16\): no layout"):
        make_plan(work, small_topology(2))


def test_infeasible_names_the_term_and_the_smallest_slice_that_fits():
    work = Workload(
        tables=tuple(TableSpec(name=f"t{i}", rows=50_000_000, dim=128) for i in range(10)),
        batch_per_rank=128,
    )
    with pytest.raises(InfeasibleError) as caught:
        make_plan(work, parse_topology("v6e:2x2"))
    message = str(caught.value)
    assert "weights and optimizer state take 240.28 GiB over 4 ranks" in message
    suggested = re.search(r"smallest v6e slice with room at this batch per rank is (\S+)\.$", message)
    assert suggested is not None
    plan = make_plan(work, parse_topology(suggested[1]))
    assert estimate(plan, work).memory.max() <= parse_topology(suggested[1]).hbm_bytes


def test_infeasible_names_a_dense_part_that_is_too_large():
    work = replace(_workload(), dense=DensePart(parameters=10**10))
    with pytest.raises(InfeasibleError, match=r"dense parameters alone take 111\.76 of 32\.00 GiB"):
        make_plan(work, parse_topology("v6e:2x2"))


def test_scale_plans_each_size_and_marks_those_too_small(config, capsys):
    tree = {**CONFIG, "model": {**CONFIG["model"], "num_embeddings": {"C1": 400_000_000, "C2": 500}}}
    config.write_text(yaml.safe_dump(tree))
    out = _run(
        capsys, "scale", "--config", config, "--chip", "v6e", "--chips", "1,4,8", "--batch-per-rank", "512"
    )
    assert re.search(r"v6e:1x1 │ 1 .* does not fit", out)
    assert re.search(r"v6e:2x4 │ 8 ", out)
    assert "100%" in out


def test_chips_and_slices():
    assert parse_chips("8..64") == [8, 16, 32, 64]
    assert [str(one) for one in sizes("v5p", [8, 512, 8192])] == ["v5p:2x2x2", "v5p:8x8x8", "2*v5p:16x16x16"]
    with pytest.raises(PlanInputError, match=r"no slice of shape 3x5; nearest: 4x4"):
        parse_topology("v6e:3x5")
    with pytest.raises(PlanInputError, match="unknown chip 'v9'"):
        parse_topology("v9:2x2")


def test_a_users_own_topology(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("chip: v6e\nshape: [2, 3]\nhost_shape: [2, 1]\n")
    topology = parse_topology(str(path))
    assert (topology.ranks, topology.host_ranks) == (6, 2)
    assert [group.ranks for group in topology.row_groups] == [2, 6]


@pytest.mark.parametrize("spec", ["v5e:4x8", "v5p:4x4x8", "tpu7x:2x2x2", "2*v6e:2x4", "v4:4x4x4"])
def test_ranks_of_a_host_and_of_a_row_group_are_a_box_of_chips(spec):
    topology = parse_topology(spec)
    at = [topology.coordinates(rank) for rank in range(topology.ranks)]
    assert len(set(at)) == topology.ranks
    for group in topology.row_groups:
        for first in range(0, topology.ranks, group.ranks):
            chips = {at[rank][:2] for rank in range(first, first + group.ranks)}
            assert len({slice_index for slice_index, _ in chips}) == 1
            for axis, side in enumerate(group.box):
                values = {position[axis] for _, position in chips}
                assert len(values) == max(values) - min(values) + 1 == side


def _chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    pytest.skip("no chromium on this machine: apt-get install chromium")


def test_the_page_draws_the_plan_in_a_browser(config, capsys, tmp_path):
    browser = _chromium()
    page = tmp_path / "plan.html"
    _made(config, capsys, "plan.json", "--html", page)
    result = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=3000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    dom = result.stdout
    assert 'data-ready="yes"' in dom, "the page's script did not finish"
    assert "http" not in re.sub(r'<script type="application/json".*?</script>', "", dom, flags=re.DOTALL)
    for text in ("v6e:2x4", "Slowest ranks", "t_C1", "samples/s"):
        assert text in dom
    assert dom.count("<tr") > len(CONFIG["model"]["num_embeddings"]) + 8


@pytest.mark.parametrize("kind", ["dlrm", "dlrm_dcnv2", "deepfm", "dcnv2"])
def test_a_training_config_is_planned_as_it_is(tmp_path, capsys, kind):
    """Table sizes of the generator, multi-hot sizes as pooling factors, every kind of click model."""
    from recsys_tpu.config import dump_config, load_config

    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump({"model": {"kind": kind}, "data": {"kind": "synthetic"}}))
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_config(load_config(path, [])), encoding="utf-8")
    for one in (path, resolved):
        workload = read_workload(one, 4)
        assert len(workload.tables) == 26
        assert workload.tables[0].rows == 1000
        assert workload.dense.parameters > 26 * 16


def test_multi_hot_sizes_are_pooling_factors(config):
    config.write_text(yaml.safe_dump({**CONFIG, "plan": {}, "data": {"multi_hot": {"sizes": {"C3": 7}}}}))
    factors = {t.name: t.pooling_factors for t in read_workload(config, 8).tables}
    assert factors["t_C3"] == (7,) and factors["t_C1"] == (1.0,)


def test_sizes_that_only_the_data_has_are_asked_for(config):
    config.write_text(yaml.safe_dump({"data": {"kind": "criteo_sample"}, "model": {}}))
    with pytest.raises(PlanInputError, match=r"needs model\.num_embeddings"):
        read_workload(config, 8)


def test_deduplicated_tables_exchange_distinct_rows():
    """4 ids drawn from one row: a rank sends one id and gets one row, not 4 and one bag of 4."""
    spec = TableSpec(name="a", rows=1, dim=16, pooling_factors=(4.0,))
    topology = small_topology(4)

    def shared(table: TableSpec) -> float:
        work = Workload(tables=(table,), batch_per_rank=8)
        return (
            CostModel(work, topology, topology.row_groups[0])
            .shared(table, ShardingType.TABLE_WISE, 1.0)
            .receive
        )

    plain, distinct = shared(spec), shared(replace(spec, deduplicated=True))
    # plain: 8 bags of 2 x 16 floats and 32 ids of 8 bytes a rank; distinct: one row there and back, one id
    assert plain / distinct == pytest.approx((8 * 128 + 32 * 8) / (128 + 8))


def test_memory_of_a_step_is_what_the_compiler_reports():
    """Peak HBM that libtpu reported for configs/dlrm.yaml (docs/planner.md has the commands), within 10 %."""
    peaks = {"v5e": 211.7, "v5p": 66.1, "v6e": 76.2, "tpu7x": 60.1}
    for name, mib in peaks.items():
        chip = replace(CHIPS[name], devices=1)
        one = (1,) * chip.mesh_axes
        device = Topology(chip=chip, shape=one, wrap=(False,) * len(one), slices=1, host_shape=one)
        work = read_workload(Path(__file__).parents[3] / "configs" / "dlrm.yaml", 1)
        plan = make_plan(work, device)
        assert estimate(plan, work).memory.max() / 2**20 == pytest.approx(mib, rel=0.1)
