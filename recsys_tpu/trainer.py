"""The Trainer wires task, optimizer, checkpoints and logs of one run together."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsys_tpu.checkpoint import CheckpointStore, TrainerState, load_tensors, read_trainer_state
from recsys_tpu.checkpoint_storage import flat
from recsys_tpu.config import Config, dump_config
from recsys_tpu.embeddings.initialization import initialize_tables
from recsys_tpu.errors import ConfigError, PreemptedError, TrainingDivergedError
from recsys_tpu.host_memory import release_free_memory
from recsys_tpu.kernels.debug import debugging
from recsys_tpu.numerics import SpikeWatch, first_bad_tensor, gradient_norm
from recsys_tpu.optimizers import LearningRateSchedule, build_optimizer, fuse_table_optimizer
from recsys_tpu.plain_state import load_plain, read_plain
from recsys_tpu.preemption import StopVote
from recsys_tpu.profiling import StepProfiler
from recsys_tpu.protocol.run import ProtocolRun
from recsys_tpu.run_log import RunLog
from recsys_tpu.runtime import Runtime
from recsys_tpu.runtime.peers import PeerWatch
from recsys_tpu.runtime.places import Patience
from recsys_tpu.sharding.canonical_state import canonical_state, restore_state
from recsys_tpu.sharding.clipping import GlobalNormClipping
from recsys_tpu.sharding.pipeline import buffer_metrics, host_times, prepared_ahead
from recsys_tpu.sharding.placement import shard_model
from recsys_tpu.step_timer import StepTimer
from recsys_tpu.tasks import Metrics, Task, build_task
from recsys_tpu.whole_step import WholeStep


class Trainer:
    """One run on one rank. `run` trains, evaluates and leaves a checkpoint."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        self.config, self.runtime = config, runtime
        self.directory = config.run.directory
        self.log = RunLog(self.directory, rank=runtime.rank)
        self.task: Task[Any, Any] = build_task(config, runtime)
        self.protocol = ProtocolRun(
            config,
            batches_per_epoch=self.task.batches_per_epoch,
            train_samples=self.task.train_samples,
            eval_samples=self.task.eval_samples,
            log=self.log,
            rank=runtime.rank,
        )
        self.total_steps = config.train.epochs * self.task.batches_per_epoch
        if config.train.max_steps is not None:
            self.total_steps = min(self.total_steps, config.train.max_steps)
        self.model = self._build_model()
        self.optimizer = build_optimizer(self.model, config.optimizer.dense)
        self.whole_step = self._build_whole_step()
        self.schedule = LearningRateSchedule(self.optimizer, config.optimizer.schedule, self.total_steps)
        max_norm = config.optimizer.max_gradient_norm
        self.clipping = None if max_norm is None else GlobalNormClipping(self.model, max_norm)
        self.gradient_norm: Tensor | None = None  # of all gradients, before clipping
        self.store = CheckpointStore(self.directory / "checkpoints", keep=config.train.keep_checkpoints)
        self.profiler = StepProfiler(runtime, self.directory)
        self.timer = StepTimer(runtime.synchronize, mark=self.profiler.phase)
        self.stop = StopVote()
        self.spikes = SpikeWatch()
        self.step = self._first_step = 0
        self.peers = PeerWatch(
            self._whereabouts,
            short_s=config.runtime.collective_timeout_s,
            long_s=config.runtime.compile_timeout_s,
            on_end=lambda reason: self.log.note("failed", level="error", step=self.step, error=reason),
        )

    def run(self) -> Metrics:
        """Train to the last step (from a checkpoint if so configured) and report the test metrics.

        Raises:
            TrainingDivergedError: a loss is NaN or infinite; no checkpoint is written after it.
            PreemptedError: SIGTERM came; a checkpoint of the last step is written.
            LostRankError: another rank died or hangs.
            CheckpointError, DatasetError: see `CheckpointStore`, `ParquetReader`.
        """
        try:
            with self.stop.listening(), debugging(self.config.train.debug_ids):
                metrics = self._run()
        except Exception as error:
            lost = self.peers.explain(error)
            reason = lost or error
            self.log.note(
                "failed", level="error", step=self.step, error=str(reason), error_type=type(reason).__name__
            )
            if lost is not None:
                raise lost from error
            self.peers.fail(str(error))
            raise
        self.log.note("finished", step=self.step)
        return metrics

    def _run(self) -> Metrics:
        self._write_config()
        self._resume()
        self._print_header()
        self.protocol.start()
        metrics = self._train()
        if metrics is None:
            metrics = self._evaluate()
        self.protocol.end(self.step)
        with self.timer.phase("checkpoint"):
            self.store.wait()
        if self.runtime.rank == 0:
            self.task.report(metrics, self.log, self.step)
        self._report_time()
        return metrics

    def evaluate_checkpoint(self, checkpoint: Path) -> Metrics:
        """Report the test metrics of a checkpoint's weights; nothing is trained or written."""
        self.load_weights(checkpoint)
        metrics = self._evaluate()
        if self.runtime.rank == 0:
            self.task.report(metrics, self.log, self.step)
        return metrics

    def close(self) -> None:
        self.profiler.close()
        self.peers.close()
        self.protocol.close()
        self.log.close()

    def _whereabouts(self) -> tuple[int, str, Patience]:
        """Step, phase, and whether other ranks may have to wait long for this one; called from a thread."""
        phase = self.timer.current
        if phase == "checkpoint" or self.step == self._first_step or self.runtime.compile_watch.compiling:
            return self.step + 1, phase, "long"
        if phase == "evaluation":
            # the first one compiles; metrics of a large split take their time, and processor time
            return self.step + 1, phase, "while busy" if phase in self.timer.finished else "long"
        return self.step + 1, phase, "short"

    # ---- set-up

    def _build_model(self) -> DistributedModelParallel:
        torch.manual_seed(self.config.run.seed)
        model: Any = self.task.build_model()
        tables = model.sparse_arch.embedding_bag_collection
        fuse_table_optimizer(tables, self.config.optimizer.sparse)
        configs = {table.name: table for table in tables.embedding_bag_configs()}
        model.compile_towers(self.runtime.compile)
        sharded = shard_model(
            model, self.runtime, self.config, max_ids_per_sample=self.task.max_ids_per_sample
        )
        initialize_tables(sharded.state_dict(), configs, self.config.run.seed)
        self._time_lookups(model)
        return sharded

    def _build_whole_step(self) -> WholeStep | None:
        if self.config.train.step == "separate_ops":
            return None
        if self.config.optimizer.max_gradient_norm is not None:
            raise ConfigError("train.step=one_program does not clip: unset optimizer.max_gradient_norm")
        return WholeStep(self.model, self.optimizer, self.task, self.config.optimizer.dense, self.runtime)

    def _time_lookups(self, model: Any) -> None:
        """Take the sparse forward out of the model's forward in the step's breakdown."""
        stack = ExitStack()

        def enter(*_: Any) -> None:
            if model.training:
                stack.enter_context(self.timer.phase("sparse_forward"))

        model.sparse_arch.register_forward_pre_hook(enter)
        model.sparse_arch.register_forward_hook(lambda *_: stack.close())

    def _write_config(self) -> None:
        if self.runtime.rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "config.yaml").write_text(dump_config(self.config), encoding="utf-8")

    # ---- training

    def _train(self) -> Metrics | None:
        """Train to the last step, or to the evaluation that reaches the target: its metrics."""
        train = self.config.train
        self._first_step = self.step
        self.log.start_progress(total=self.total_steps, done=self.step)
        losses: list[Tensor] = []
        started, logged = time.perf_counter(), self.step
        for batch in self._batches():
            self.profiler.before(self.step + 1, self.total_steps)
            losses.append(self._train_step(batch))
            self.step += 1
            if written := self.profiler.after(self.step):
                self.log.message(f"profile: {written}")
                self.log.note("profile", step=self.step, folder=str(written))
            last = self.step == self.total_steps
            evaluating = self.protocol.evaluates_after(self.step) and not last
            saving = last or (bool(train.checkpoint_every) and self.step % train.checkpoint_every == 0)
            if self.step % train.log_every == 0 or evaluating or saving:
                self._log_steps(losses, time.perf_counter() - started, self.step - logged)
                losses = []
            metrics = self._evaluate() if evaluating else None
            if saving or self.protocol.reached:
                self.save()
            if self.protocol.reached:
                self.log.stop_progress()
                return metrics
            if not last and self.stop.agreed():
                self._log_steps(losses, time.perf_counter() - started, self.step - logged)
                self._end_preempted(saved=saving)
            if not losses:
                started, logged = time.perf_counter(), self.step
        self.log.stop_progress()
        return None

    def _end_preempted(self, *, saved: bool) -> None:
        if not saved:
            self.save()
        self.store.wait()
        raise PreemptedError(
            f"SIGTERM: saved step {self.step} of {self.total_steps} in {self.store.directory}; "
            "start again with train.resume=auto to go on"
        )

    def _batches(self) -> Iterator[Any]:
        per_epoch = self.task.batches_per_epoch
        while self.step < self.total_steps:
            epoch, start = divmod(self.step, per_epoch)
            left = min(per_epoch - start, self.total_steps - self.step)
            prepared_for = self.task.prepare_steps(self.model, self.step)
            if prepared_for is not None:
                left = min(left, prepared_for)
                self.runtime.compile_watch.expect_so_far()
            read = islice(self.task.batches(epoch, start=start), left)
            # the ids of the next two batches are exchanged and sorted beside this step
            ready = prepared_ahead(self.model, read, features_of=lambda batch: batch.sparse)
            with closing(ready):
                while True:
                    with self.timer.phase("data"):
                        batch = next(ready, None)
                    if batch is None:
                        break
                    yield batch

    def _train_step(self, batch: Any) -> Tensor:
        """One optimizer step; returns this rank's share of the global mean loss (on the device)."""
        # the first step compiles; an asynchronous device is only waited for in some steps
        self.timer.active = self.step != self._first_step and (
            self.runtime.kind == "cpu" or self.step % self.config.train.log_every == 0
        )
        # random numbers follow from the step, so a resumed run draws the same ones
        torch.manual_seed(zlib.crc32(f"{self.config.run.seed}/{self.step}/{self.runtime.rank}".encode()))
        self.schedule.apply(self.step)
        with self.timer.phase("optimizer"):
            self.optimizer.zero_grad()
        loss = self._separate_ops(batch) if self.whole_step is None else self._one_program(batch)
        # before the watch looks: on a device this division is a program too, which belongs to the first step
        share = loss.detach() / self.runtime.world_size
        self.timer.step_done()
        self.runtime.compile_watch.step_done()
        return share

    def _one_program(self, batch: Any) -> Tensor:
        assert self.whole_step is not None
        with self.timer.phase("one_program"):
            return self.whole_step(batch)

    def _separate_ops(self, batch: Any) -> Tensor:
        with self.timer.phase("dense_forward"):
            loss = self.task.loss(self.model, batch)
        # on other devices this would wait for the step; they find it when the losses are logged
        if self.runtime.kind == "cpu" and not math.isfinite(value := loss.item()):
            raise TrainingDivergedError(self._divergence(self.step + 1, value))
        with self.timer.phase("backward"):
            loss.backward()
        with self.timer.phase("optimizer"):
            if self.clipping is not None:
                self.gradient_norm = self.clipping.apply()
            self.optimizer.step()
        return loss

    def _log_steps(self, losses: list[Tensor], seconds: float, steps: int) -> None:
        if not losses:
            return
        # on a device, stacking each number of losses would be a program of its own
        values = torch.stack([loss.cpu() for loss in losses])
        dist.all_reduce(values)
        for step, value in enumerate(values.tolist(), start=self.step - len(losses) + 1):
            if not math.isfinite(value):
                raise TrainingDivergedError(self._divergence(step, value))
            if self.spikes.is_spike(value):
                self.log.message(f"step {step:>6}  loss spike: {value:.5f}, far above the losses before it")
                self.log.event("loss_spike", step, {"loss": value})
        norm = gradient_norm(self.model.parameters())
        norms = {} if norm is None else {"dense_gradient_norm": float(norm)}
        if self.gradient_norm is not None:
            norms["gradient_norm"] = float(self.gradient_norm)
        rate = steps * self.config.train.batch_size / max(seconds, 1e-9)
        left = (self.total_steps - self.step) * seconds / max(steps, 1)
        phases = {f"ms_{name}": value for name, value in self.timer.report().items()}
        self.log.train_steps(
            step=self.step,
            total=self.total_steps,
            losses=values.tolist(),
            values={
                "samples_per_second": rate,
                "eta_seconds": left,
                **norms,
                **phases,
                **buffer_metrics(self.model),
            },
        )
        self.runtime.compile_watch.expect_so_far()

    def _divergence(self, step: int, loss: float) -> str:
        bad = first_bad_tensor(self.model) or "all weights are finite: the number arose in the forward"
        return (
            f"the loss of step {step} is {loss} on rank {self.runtime.rank}; {bad}. Lower "
            "optimizer.dense.learning_rate or optimizer.sparse.learning_rate, or warm up longer "
            "(optimizer.schedule.warmup_steps), and start again with train.resume=auto"
        )

    def _evaluate(self) -> Metrics:
        self.protocol.before_evaluation(self.step)
        with self.timer.phase("evaluation"):
            metrics = self.task.evaluate(self.model)
            release_free_memory()
        self.protocol.after_evaluation(self.step, metrics)
        self.runtime.compile_watch.expect_so_far()
        self.log.event("test", self.step, metrics.as_dict())
        self.log.message(f"step {self.step:>6}  test {metrics}")
        return metrics

    # ---- checkpoints

    def load_weights(self, checkpoint: Path) -> None:
        """Take the weights of `checkpoint` to evaluate or export them; collective.

        Raises:
            CheckpointError: it is damaged or of another model.
        """
        self.store.verify(checkpoint)
        tensors = {"model": self.model.state_dict()}
        load_tensors(checkpoint, tensors)
        self.model.load_state_dict(tensors["model"])
        self.step = read_trainer_state(checkpoint).step

    def save(self) -> Path:
        """Write a checkpoint of this moment, in the background; collective."""
        with self.timer.phase("checkpoint"):
            final = self.store.save(self._tensors(), self._state(), dump_config(self.config))
        self.log.note("checkpoint", step=self.step, folder=str(final), waited_s=self.store.blocked_s)
        return final

    def load(self, checkpoint: Path) -> None:
        """Continue from `checkpoint`: weights, optimizer state and step; collective."""
        state = read_trainer_state(checkpoint)
        state.refuse_others(checkpoint, self._state())
        self.optimizer.init_state()
        tensors = self._tensors()
        load_tensors(checkpoint, tensors)
        self.model.load_state_dict(tensors["model"])
        restore_state(self.model, tensors["optimizer"])
        self.optimizer.load_state_dict(self.optimizer.state_dict())  # restored in place; takes it over
        self.task.load_state(tensors["task"])
        self.step = state.step

    def _state(self) -> TrainerState:
        return TrainerState(
            step=self.step,
            world_size=self.runtime.world_size,
            num_embeddings=dict(self.task.num_embeddings),
            data_order=self.task.data_order(),
        )

    def _tensors(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": canonical_state(self.model, self.optimizer.state_dict()["state"]),
            "task": self.task.state(),
        }

    def _resume(self) -> None:
        wanted = self.config.train.resume
        if wanted == "never":
            self._start_from_plain()
            return
        if wanted == "auto":
            checkpoint = self.store.newest_intact(self.log.message)
        else:
            checkpoint = Path(wanted)
            self.store.verify(checkpoint)
        if checkpoint is None:
            self.log.message(f"train.resume=auto: no checkpoint in {self.store.directory}, starting new")
            self._start_from_plain()
            return
        self.load(checkpoint)
        self.log.note("resumed", step=self.step, checkpoint=str(checkpoint))
        self.log.message(f"resumed from {checkpoint} at step {self.step}")

    def _start_from_plain(self) -> None:
        """Takes weights, and optimizer state if it is there, from a state_dict of whole tensors."""
        train = self.config.train
        if train.start_from is None:
            return
        content = read_plain(train.start_from)
        options: Any = {"path": train.start_from, "partial": train.start_partial, "grow": train.grow_tables}
        model = self.model.state_dict()
        report = load_plain(model, content["model"], **options)
        self.model.load_state_dict(model)
        self.log.message(f"started from {train.start_from}: {report}")
        if "optimizer" in content:
            self.optimizer.init_state()
            state = canonical_state(self.model, self.optimizer.state_dict()["state"])
            report = load_plain(flat(state), content["optimizer"], of_all_ranks=True, **options)
            if report.kept:
                self.log.message(f"{train.start_from}: no optimizer state of {', '.join(report.kept)}")
            restore_state(self.model, state)
            self.optimizer.load_state_dict(self.optimizer.state_dict())  # restored in place; takes it over

    # ---- reports

    def _report_time(self) -> None:
        phases = self.timer.summary()
        watch = self.runtime.compile_watch
        breakdown = ", ".join(f"{name} {value:.2f}" for name, value in phases.items())
        self.log.message(f"ms a step: {breakdown} (the table update is part of backward)")
        overlap = host_times(self.model).overlap
        self.log.message(f"preparation of ids: {overlap:.0%} of it ran beside the steps")
        self.log.message(
            f"compilation: {watch.first_step_compile_s:.1f} s in the first step, "
            f"{len(watch.after_warmup)} recompilations after step {watch.warmup_steps}"
        )
        self.log.event(
            "time",
            self.step,
            {
                **{f"ms_{name}": value for name, value in phases.items()},
                "first_step_compile_s": watch.first_step_compile_s,
                "recompilations": len(watch.after_warmup),
                "preparation_overlap": overlap,
            },
        )

    def _print_header(self) -> None:
        rows = sum(self.task.num_embeddings.values())
        dense = sum(p.numel() for n, p in self.model.named_parameters() if "embedding_bags" not in n)
        lines = {
            **self.runtime.describe(),
            "data": self.task.describe_data(),
            "model": f"{self.config.model.kind}: {len(self.task.num_embeddings)} tables, {rows:,} rows of "
            f"dim {self.config.model.embedding_dim}; {dense:,} dense parameters",
            "steps": f"{self.total_steps:,} of global batch {self.config.train.batch_size:,}",
        }
        for name, value in lines.items():
            self.log.message(f"{name:>16}: {value}")
        self.log.event("header", self.step, lines)
        self.log.event("dataset", self.step, self.task.dataset())
