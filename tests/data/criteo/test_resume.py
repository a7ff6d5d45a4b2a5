"""Killed, interrupted, out of disk or out of step: continue or say why not."""

import fcntl
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from recsys_tpu.data.criteo import preprocess as preprocess_module
from recsys_tpu.data.criteo import work
from recsys_tpu.data.criteo.__main__ import main
from recsys_tpu.data.criteo.pool import WorkerDied, run_tasks
from recsys_tpu.data.criteo.preprocess import preprocess
from recsys_tpu.data.criteo.recipe import Hashed, Recipe, Vocabulary
from recsys_tpu.data.criteo.source import SourceError
from recsys_tpu.data.criteo.workspace import RecipeMismatch
from recsys_tpu.data.metadata import DatasetError
from tests.data.criteo.reference import random_lines
from tests.data.criteo.test_preprocess import all_files, write_log

HASHED = Recipe(Hashed((1000,) * 26), row_group_rows=50, rows_per_part=100)
VOCABULARY = Recipe(Vocabulary(3), splits=("train=1-700", "test=701-"), row_group_rows=50, rows_per_part=100)


@pytest.fixture
def log(tmp_path) -> Path:
    return write_log(tmp_path / "day_0", random_lines(1000, seed=30, distinct=50))


def run(log: Path, output: Path, recipe: Recipe = HASHED, **options):
    return preprocess([str(log)], output, recipe, jobs=1, **options)


class Killed(BaseException):
    """Stands for a kill: nothing in the package may catch it."""


@pytest.mark.parametrize("recipe", [HASHED, VOCABULARY], ids=["hashed", "vocabulary"])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_run_stopped_at_any_step_continues_to_the_same_output(tmp_path, monkeypatch, recipe, zipped):
    log = write_log(tmp_path / ("day_0.gz" if zipped else "day_0"), random_lines(1000, seed=30, distinct=50))
    run(log, tmp_path / "whole", recipe)
    expected = all_files(tmp_path / "whole")
    output = tmp_path / "out"
    save = preprocess_module.Workspace.save
    saved = []
    stops = 0

    def save_or_die(self, name, content):
        if name not in saved and len(saved) % 3 == 2:
            saved.append(name)  # die here once, before the step is recorded
            raise Killed
        saved.append(name)
        save(self, name, content)

    monkeypatch.setattr(preprocess_module.Workspace, "save", save_or_die)
    while True:
        try:
            run(log, output, recipe)
            break
        except Killed:
            stops += 1
            assert not (output / "metadata.json").exists()
    assert stops >= 3
    assert all_files(output) == expected


def test_finished_parts_are_not_made_again(tmp_path, monkeypatch, log):
    output = tmp_path / "out"
    parse = work.parse_block
    parsed = []

    def parse_until(text, *, first_line, labelled):
        if first_line > 500 and len(parsed) < 6:
            raise Killed
        parsed.append(first_line)
        return parse(text, first_line=first_line, labelled=labelled)

    monkeypatch.setattr(work, "parse_block", parse_until)
    with pytest.raises(Killed):
        run(log, output)
    assert parsed == [1, 101, 201, 301, 401]
    parsed.append(0)
    run(log, output)
    assert parsed[6:] == [501, 601, 701, 801, 901]


def test_the_report_of_a_continued_run_counts_what_it_did_itself(tmp_path, monkeypatch, log):
    output = tmp_path / "out"
    monkeypatch.setattr(preprocess_module, "_finish", lambda *arguments: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        run(log, output)
    monkeypatch.undo()
    (output / "_work" / "encode" / "train-00004.json").unlink()
    screen = io.StringIO()
    run(log, output, console=Console(file=screen, force_terminal=True, width=200, highlight=False))
    assert "encode: 900 rows were finished earlier" in screen.getvalue()
    assert "encode: 100 rows in" in screen.getvalue()
    assert "rows/s" in screen.getvalue()
    assert "ETA" in screen.getvalue()


def command(log: Path, output: Path, *options: str) -> list[str]:
    return [
        *(sys.executable, "-m", "recsys_tpu.data.criteo", "preprocess", "--input", str(log)),
        *("--output", str(output), "--recipe", "hashed", "--num-embeddings", "1000", "--jobs", "2"),
        *("--row-group-rows", "200", "--rows-per-part", "200", *options),
    ]


def test_a_killed_process_leaves_no_worker_and_can_be_continued(tmp_path):
    log = write_log(tmp_path / "day_0", random_lines(300, seed=31) * 40)
    output = tmp_path / "out"
    process = subprocess.Popen(command(log, output), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list(output.glob("_work/encode/*.json"))) < 3:
        assert process.poll() is None, "finished before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (output / "metadata.json").exists()
    finished = {path.stem: path.stat().st_mtime_ns for path in output.glob("train/*.parquet")}
    while True:  # the workers notice and end, after which nothing is written any more
        time.sleep(0.5)
        now = {path.stem: path.stat().st_mtime_ns for path in output.glob("train/*.parquet")}
        if now == finished:
            break
        finished = now
        assert time.monotonic() < deadline
    marked = {path.stem.removeprefix("train-") for path in output.glob("_work/encode/*.json")}
    again = subprocess.run(command(log, output), capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    assert "12,000 rows read = 12,000 written + 0 rejected" in again.stderr
    for stem, modified in finished.items():
        if stem.removeprefix("part-") in marked:
            assert (output / "train" / f"{stem}.parquet").stat().st_mtime_ns == modified
    run_again = tmp_path / "whole"
    subprocess.run(command(log, run_again), stderr=subprocess.DEVNULL, timeout=120, check=True)
    assert all_files(output) == all_files(run_again)


def test_ctrl_c_stops_all_workers_and_says_how_to_continue(tmp_path):
    log = write_log(tmp_path / "day_0", random_lines(300, seed=31) * 100)
    output = tmp_path / "out"
    process = subprocess.Popen(
        command(log, output), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while len(list(output.glob("_work/encode/*.json"))) < 3:
        assert process.poll() is None, "finished before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the parent and its workers
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; run the same command again to continue" in message
    assert "Traceback" not in message


def test_another_recipe_is_refused_with_what_differs(tmp_path, monkeypatch, log):
    output = tmp_path / "out"
    monkeypatch.setattr(preprocess_module, "_finish", lambda *arguments: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        run(log, output)
    monkeypatch.undo()
    with pytest.raises(RecipeMismatch, match=r"was begun with other.*num_embeddings\.C26 was 1000, now 7\."):
        run(log, output, Recipe(Hashed((*[1000] * 25, 7)), row_group_rows=50, rows_per_part=100))
    with pytest.raises(RecipeMismatch, match='kind was "hashed", now "vocabulary"'):
        run(log, output, Recipe(Vocabulary(3), row_group_rows=50, rows_per_part=100))
    run(log, output)
    with pytest.raises(
        RecipeMismatch, match=r"was made with other.*compression was \"zstd\", now \"snappy\""
    ):
        run(
            log,
            output,
            Recipe(Hashed((1000,) * 26), row_group_rows=50, rows_per_part=100, compression="snappy"),
        )


def test_a_changed_source_is_refused(tmp_path, monkeypatch, log):
    output = tmp_path / "out"
    monkeypatch.setattr(preprocess_module, "_finish", lambda *arguments: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        run(log, output)
    monkeypatch.undo()
    write_log(log, random_lines(1000, seed=99, distinct=50))
    with pytest.raises(RecipeMismatch, match=r"files\[0\]\.sha256 was"):
        run(log, output)


def test_a_source_that_changes_while_it_is_read_is_noticed(tmp_path, monkeypatch, log):
    resolve = preprocess_module.resolve_splits

    def resolve_and_touch(*arguments, **options):
        os.utime(log, ns=(1, 1))
        return resolve(*arguments, **options)

    monkeypatch.setattr(preprocess_module, "resolve_splits", resolve_and_touch)
    with pytest.raises(SourceError, match="day_0: changed while it was read"):
        run(log, tmp_path / "out")


def test_a_touched_but_equal_source_continues(tmp_path, monkeypatch, log):
    output = tmp_path / "out"
    monkeypatch.setattr(preprocess_module, "_finish", lambda *arguments: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        run(log, output)
    monkeypatch.undo()
    os.utime(log, ns=(1, 1))
    assert run(log, output).splits["train"].rows == 1000


def test_a_complete_directory_is_left_alone(tmp_path, log, capsys):
    output = tmp_path / "out"
    arguments = command(log, output)[3:]
    assert main(arguments) == 0
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert main(arguments) == 0
    assert "already complete" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    write_log(log, random_lines(5, seed=1))
    assert main(arguments) == 1
    assert "source[0].bytes was" in capsys.readouterr().err


def test_a_directory_of_something_else_is_left_alone(tmp_path, log):
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.tex").write_text("")
    with pytest.raises(DatasetError, match="not empty and not a directory that this command began"):
        run(log, output)


def test_two_runs_into_one_directory_are_refused(tmp_path, log):
    output = tmp_path / "out"
    (output / "_work").mkdir(parents=True)
    with (output / "_work" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DatasetError, match="another preprocess run is writing here"):
            run(log, output)


def test_a_full_disk_says_what_to_do(tmp_path, log, capsys, monkeypatch):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    output = tmp_path / "out"
    (output / "_work").mkdir(parents=True)
    (output / "_work" / "encode").mkdir()
    temporary = output / "_work" / "encode" / "train-00003.tmp"
    temporary.symlink_to("/dev/full")  # every write there fails as on a full disk
    arguments = command(log, output, "--jobs", "1")[3:]
    assert main(arguments) == 1
    message = capsys.readouterr().err
    assert "no space left for" in message
    assert "free some" in message
    assert not (output / "metadata.json").exists()
    assert main(arguments) == 0  # now there is space


def die(task, report):
    os._exit(9)


def fail_or_wait(task, report):
    if task == 0:
        raise SourceError("day_0: broken")
    while True:
        report(1)
        time.sleep(0.01)


def test_a_dead_worker_is_an_error():
    with pytest.raises(WorkerDied, match="fewer --jobs"):
        run_tasks(die, [1, 2], jobs=2, report=lambda amount: None)


def test_the_first_error_stops_the_other_workers():
    with pytest.raises(SourceError, match="day_0: broken"):
        run_tasks(fail_or_wait, [0, 1], jobs=2, report=lambda amount: None)


# Allocators that give freed memory back, or the peak depends on the threads' timing.
ONE_HEAP = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
# VmHWM and not ru_maxrss, which a child process inherits from its parent.
PEAK = """
import sys
from pathlib import Path
from recsys_tpu.data.criteo.preprocess import preprocess
from recsys_tpu.data.criteo.recipe import Hashed, Recipe
recipe = Recipe(Hashed((1000,) * 26), row_group_rows=4096, rows_per_part=4096 * 4)
preprocess([sys.argv[1]], Path(sys.argv[2]), recipe, jobs=1)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    lines = random_lines(1000, seed=32)
    peaks = []
    for copies in (20, 220):
        log = write_log(tmp_path / f"log{copies}{suffix}", lines * copies)
        arguments = [sys.executable, "-c", PEAK, str(log), str(tmp_path / f"out{copies}{suffix}")]
        result = subprocess.run(
            arguments, capture_output=True, text=True, timeout=120, check=True, env=os.environ | ONE_HEAP
        )
        peaks.append(int(result.stdout) / 1024)
    size = sum(len(line) + 1 for line in lines) * 200 / 2**20
    assert size > 50
    assert peaks[1] - peaks[0] < 10, (
        f"{size:.0f} MiB more text took the peak from {peaks[0]:.0f} to {peaks[1]:.0f} MiB"
    )


def test_the_package_does_not_import_torch():
    code = "import sys, recsys_tpu.data.criteo.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
