"""Checkpoints: whole or absent, verified, resumed to the bit, at another number of ranks too."""

from __future__ import annotations

import errno
import json
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch

from recsys_tpu import checkpoint_storage
from recsys_tpu.checkpoint import load_tensors, read_trainer_state
from recsys_tpu.checkpoint_storage import CheckpointReader, damage, read_manifest, stage
from recsys_tpu.errors import CheckpointError
from tests.tiny_run import losses, run, run_ranks, stop_at, tiny_config, trainer

STEPS = 100
RANK = str(Path(__file__).with_name("tiny_rank.py"))
CHANGES = {
    "dense adagrad": {"optimizer__dense": {"kind": "adagrad"}},
    "sparse adagrad": {"optimizer__sparse": {"kind": "adagrad"}},
    "schedule": {"optimizer__schedule": {"warmup_steps": 10, "decay_start_step": 20}},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the generated log, shared by the tests of this module."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def config(tmp_path: Path, data: Path):
    def make(**overrides):
        return tiny_config(tmp_path, **{"data__cache_dir": str(data), **overrides})

    return make


@pytest.fixture
def two_checkpoints(config):
    """A run with checkpoints of steps 10 and 20, its config and their folders."""
    made = config(train__max_steps=20, train__checkpoint_every=10)
    run(made)
    folders = sorted((made.run.directory / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step_00000010", "step_00000020"]
    return made, folders


# ---- resuming


@pytest.mark.parametrize("change", [{}, *CHANGES.values()], ids=["plain", *CHANGES])
def test_resumed_losses_equal_uninterrupted_ones_to_the_bit(config, change):
    whole = run(config(run__name="whole", train__max_steps=STEPS, **change))
    assert len(whole) == STEPS
    # the interrupted run knows the number of all steps: it is stopped, not configured to be shorter
    interrupted = config(run__name="cut", train__max_steps=STEPS, train__checkpoint_every=25, **change)
    with trainer(interrupted) as made, pytest.raises(KeyboardInterrupt):
        stop_at(made, 60)
        made.run()
    resumed = config(run__name="cut", train__max_steps=STEPS, train__resume="auto", **change)
    again = run(resumed)
    assert list(again) == list(range(51, STEPS + 1))
    assert again == {step: whole[step] for step in again}


def test_resume_crosses_an_epoch_in_the_same_order(config):
    settings = {"train__max_steps": 150, "train__epochs": 2, "train__batch_size": 128}  # 125 steps an epoch
    whole = run(config(run__name="whole", **settings))
    with trainer(config(run__name="cut", train__checkpoint_every=120, **settings)) as made:
        stop_at(made, 121)
        with pytest.raises(KeyboardInterrupt):
            made.run()
    again = run(config(run__name="cut", train__resume="auto", **settings))
    assert again == {step: whole[step] for step in range(121, 151)}


def test_tables_change_and_come_back_whole(config, two_checkpoints):
    made, (first, second) = two_checkpoints
    with trainer(made) as fresh:
        before = stage(fresh.model.state_dict())
        fresh.load(first)
        at_10 = stage(fresh.model.state_dict())
        fresh.load(second)
        at_20 = stage(fresh.model.state_dict())
    tables = [name for name in before if "embedding_bags" in name]
    assert len(tables) == 4
    for name in tables:
        values = [_whole(state[name]) for state in (before, at_10, at_20)]
        assert not torch.equal(values[0], values[1]) and not torch.equal(values[1], values[2])


def test_resume_auto_without_checkpoints_starts_new(config):
    assert list(run(config(train__resume="auto", train__max_steps=5))) == [1, 2, 3, 4, 5]


def test_resume_from_a_path(config, two_checkpoints):
    made, (first, _) = two_checkpoints
    again = run(config(run__name="other", train__max_steps=20, train__resume=str(first)))
    assert again == {step: loss for step, loss in losses(made.run.directory).items() if step > 10}


def test_only_the_newest_are_kept(config):
    made = config(train__max_steps=20, train__checkpoint_every=2, train__keep_checkpoints=3)
    run(made)
    names = sorted(path.name for path in (made.run.directory / "checkpoints").iterdir())
    assert names == ["step_00000016", "step_00000018", "step_00000020"]


# ---- damage


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGES = {
    "flipped bit": (_flip_a_bit, "SHA-256"),
    "truncated": (_truncate, "bytes"),
    "missing": (Path.unlink, "missing"),
}
FILES = ["__0_0.distcp", "tensors.json", "trainer.json", "config.yaml"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_names_the_file(tmp_path, two_checkpoints, kind, file):
    _, (folder, _) = two_checkpoints
    spoil, message = DAMAGES[kind]
    assert damage(folder) is None
    spoil(folder / file)
    found = damage(folder)
    assert found is not None and file in found and message in found


@pytest.mark.parametrize("kind", DAMAGES)
def test_resume_auto_falls_back_and_says_so(config, two_checkpoints, kind, capsys):
    _, (_, second) = two_checkpoints
    DAMAGES[kind][0](second / "__0_0.distcp")
    again = run(config(train__max_steps=20, train__resume="auto"))
    said = " ".join(capsys.readouterr().out.split())
    assert "damaged checkpoint passed over" in said and "step_00000020" in said
    assert "resumed from" in said and "at step 10" in said
    assert list(again) == list(range(11, 21))


@pytest.mark.parametrize("spoil", [_flip_a_bit, _truncate, Path.unlink])
def test_a_damaged_manifest_is_passed_over_too(config, two_checkpoints, spoil):
    _, (_, second) = two_checkpoints
    spoil(second / "manifest.json")
    assert list(run(config(train__max_steps=20, train__resume="auto"))) == list(range(11, 21))


def test_all_checkpoints_damaged_is_an_error(config, two_checkpoints):
    for folder in two_checkpoints[1]:
        _truncate(folder / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="all 2 checkpoints are damaged"):
        run(config(train__max_steps=20, train__resume="auto"))


def test_a_damaged_checkpoint_asked_for_by_path_is_an_error(config, two_checkpoints):
    _, (first, _) = two_checkpoints
    _flip_a_bit(first / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"step_00000010/__0_0\.distcp: corrupted"):
        run(config(train__max_steps=20, train__resume=str(first)))


def test_a_folder_that_is_no_checkpoint(config, tmp_path):
    with pytest.raises(CheckpointError, match=r"not a checkpoint \(it has no manifest"):
        run(config(train__resume=str(tmp_path)))


# ---- another run's checkpoint

OTHERS = {
    "table size": ({"model__num_embeddings": {"C1": 51, "C2": 30, "C3": 20, "C4": 10}}, "C1 was 50, now 51"),
    "batch": ({"train__batch_size": 256}, "data batch_size was 128, now 256"),
    "seed": ({"run__seed": 2}, "data seed was 1, now 2"),
    "lanes": ({"data__lanes": 4}, "data lanes was 8, now 4"),
    "shuffle": ({"data__shuffle": False}, "data shuffle was True, now False"),
    "data": ({"data__synthetic__seed": 8}, "data content was"),
    "layers": ({"model__over_mlp": [16, 8]}, "it belongs to another model or optimizer"),
    "width": ({"model__over_mlp": [8]}, r"has shape \(16,.*this run.s has \(8,"),
    "dim": ({"model__embedding_dim": 4}, r"has shape"),
    "dense optimizer": ({"optimizer__dense": {"kind": "sgd"}}, "this run has no place for"),
    "sparse optimizer": ({"optimizer__sparse": {"kind": "sgd"}}, "it belongs to another model or optimizer"),
}  # fmt: skip


@pytest.mark.parametrize("change", OTHERS)
def test_checkpoint_of_another_config_is_refused(config, two_checkpoints, change):
    overrides, message = OTHERS[change]
    with pytest.raises(CheckpointError, match=message):
        run(config(train__max_steps=20, train__resume="auto", **overrides))


# ---- writing


def test_a_crash_before_the_rename_leaves_the_previous_one(config, two_checkpoints, monkeypatch):
    _, folders = two_checkpoints
    more = config(train__max_steps=30, train__checkpoint_every=10, train__resume="auto")

    def crash(new: Path, final: Path) -> None:
        raise SystemError("power cut")

    monkeypatch.setattr(checkpoint_storage, "replace_folder", crash)
    with pytest.raises(CheckpointError, match="power cut"):
        run(more)
    left = sorted(path.name for path in folders[0].parent.iterdir())
    assert left == [".step_00000030.partial", "step_00000010", "step_00000020"]
    monkeypatch.undo()
    assert list(run(more)) == list(range(21, 31))
    left = sorted(path.name for path in folders[0].parent.iterdir())
    assert left == ["step_00000010", "step_00000020", "step_00000030"]


def test_leftovers_of_another_world_size_do_not_stay(config, two_checkpoints):
    _, folders = two_checkpoints
    partial = folders[0].parent / ".step_00000030.partial"
    shutil.copytree(folders[0], partial)
    (partial / "__7_0.distcp").write_bytes(b"of a rank that is no more")
    run(config(train__max_steps=30, train__resume="auto"))
    assert not partial.exists()
    assert "__7_0.distcp" not in {path.name for path in (folders[0].parent / "step_00000030").iterdir()}


def test_the_same_step_again_replaces_the_folder(config, two_checkpoints):
    _, (_, second) = two_checkpoints
    old = read_manifest(second)["__0_0.distcp"]
    _flip_a_bit(second / "__0_0.distcp")
    run(config(train__max_steps=20, train__resume="auto"))
    assert damage(second) is None and read_manifest(second)["__0_0.distcp"] == old


def test_file_size_limit_is_an_error_and_the_previous_one_stays(config, two_checkpoints):
    """The system call fails for real: EFBIG in place of ENOSPC, which would need a disk of its own."""
    _, (_, second) = two_checkpoints
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"a file may not grow.*step_00000020 is untouched"):
            run(config(train__max_steps=30, train__resume="auto"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert damage(second) is None


@pytest.mark.parametrize(
    ("code", "message"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "read-only"), (errno.EIO, "reports an error")],
)
def test_disk_errors_say_what_to_do(config, monkeypatch, code, message):
    def fail(*_: object) -> None:
        raise OSError(code, "as the system says")

    monkeypatch.setattr(checkpoint_storage, "_write", fail)
    with pytest.raises(CheckpointError, match=rf"{message}.*There is no earlier one.*start again with"):
        run(config(train__max_steps=5))


def test_a_failed_background_save_ends_the_run_at_the_next_save(config, monkeypatch):
    monkeypatch.setattr(checkpoint_storage, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with trainer(config(train__checkpoint_every=10)) as made:
        with pytest.raises(CheckpointError, match="step_00000010 could not be written"):
            made.run()
        assert made.step == 20


def test_training_after_save_does_not_change_what_is_written(config):
    with trainer(config(train__max_steps=5)) as made:
        made.run()
        before = stage(made.model.state_dict())
        folder = made.save()
        for value in made.model.parameters():  # while the writer may still run
            with torch.no_grad():
                value.fill_(7.0)
        made.store.wait()
        made.load(folder)
        after = stage(made.model.state_dict())
    for name in before:
        assert torch.equal(_whole(before[name]), _whole(after[name])), name


# ---- nothing is unpickled


class _Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def test_reading_never_unpickles(two_checkpoints, config):
    made, (folder, _) = two_checkpoints
    (folder / ".metadata").write_bytes(pickle.dumps(_Bomb()))
    with trainer(made) as fresh:
        fresh.load(folder)  # DCP's own metadata file is not looked at
        entry = json.loads((folder / "tensors.json").read_text())
        chunk = entry["model.dense_arch.model._mlp.0._linear.bias"]["chunks"][0]
        shard = bytearray((folder / chunk["file"]).read_bytes())
        bomb = _zip_of_a_pickle().ljust(chunk["bytes"], b"\0")
        shard[chunk["position"] : chunk["position"] + chunk["bytes"]] = bomb[: chunk["bytes"]]
        (folder / chunk["file"]).write_bytes(bytes(shard))
        with pytest.raises(CheckpointError):
            load_tensors(folder, fresh._tensors())


def _zip_of_a_pickle() -> bytes:
    import io

    buffer = io.BytesIO()
    torch.save(_Bomb(), buffer)
    return buffer.getvalue()


def test_values_that_are_no_tensors_are_not_saved():
    with pytest.raises(TypeError, match="a is a int; a checkpoint holds tensors only"):
        stage({"a": 3})


@pytest.mark.parametrize("name", ["../outside", "a/b", "", ".."])
def test_a_manifest_cannot_name_files_outside(two_checkpoints, name):
    _, (folder, _) = two_checkpoints
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content["files"][name] = {"bytes": 0, "sha256": ""}
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        read_manifest(folder)


MALFORMED_MANIFESTS = [
    "",
    "{",
    "[]",
    "null",
    "7",
    '{"format_version": 1}',
    '{"format_version": 2, "files": {}}',
    '{"format_version": 1, "files": {"a": 3}}',
]


@pytest.mark.parametrize("text", MALFORMED_MANIFESTS)
def test_a_malformed_manifest_is_an_error(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"damaged|unknown to this version"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": {}}', '{"a": {"dtype": "exec", "size": [], "chunks": []}}', '{"a": 1}']
)
def test_malformed_tensor_metadata_is_an_error(tmp_path, text):
    (tmp_path / "tensors.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"damaged|which torch does not know"):
        CheckpointReader(tmp_path).read_metadata()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 1}'])
def test_a_malformed_trainer_file_is_an_error(tmp_path, text):
    (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(CheckpointError, match="damaged"):
        read_trainer_state(tmp_path)


# ---- two ranks and elastic


@pytest.mark.slow
def test_two_ranks_resume_to_the_bit_and_other_worlds_go_on(config, tmp_path):
    """2 ranks: whole = cut + resumed.  1 and 4 ranks go on from a checkpoint of 2, optimizer state too."""
    settings = {"train__max_steps": STEPS, "train__checkpoint_every": 50}
    checkpoint = config(run__name="cut").run.directory / "checkpoints" / "step_00000050"

    def job(name: str, **overrides: str) -> str:
        made = config(run__name=name, **settings, **overrides)
        path = tmp_path / f"{name}.json"
        path.write_text(made.model_dump_json())
        return str(path)

    resume = {"train__resume": str(checkpoint)}
    run_ranks([RANK, job("whole"), job("cut"), "60", job("on2", **resume)], 2)
    run_ranks([RANK, job("on4", **resume)], 4)
    run(config(run__name="on1", **settings, **resume))

    whole = losses(tmp_path / "runs" / "whole")
    assert list(whole) == list(range(1, STEPS + 1))
    for world in (1, 2, 4):
        again = losses(tmp_path / "runs" / f"on{world}")
        assert list(again) == list(range(51, STEPS + 1))
        for step, loss in again.items():
            tolerance = 0.0 if world == 2 else 1e-5  # sums over ranks are taken in another order
            assert abs(loss - whole[step]) <= tolerance * whole[step], (world, step)


def _whole(value) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    ((_, tensor),) = value.shards
    return tensor


def test_dlrm_pr_8_a_run_without_evaluation_steps_still_saves(tmp_path):
    config = tiny_config(tmp_path, train__max_steps=3, train__eval_every=0)
    run(config)
    assert [path.name for path in (config.run.directory / "checkpoints").iterdir()] == ["step_00000003"]
