"""The training loop of one arm.

A step's rows are a function of (seed, step) alone; its gradient is the sum over all its valid targets divided by their number,
however the rows are cut into micro-batches and dealt to processes (ranks.py); a loss or gradient that is not finite stops the run
before the weights change.
"""

import contextlib
import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.account import Account
from models.arm import LanguageModel, ModelDescription, build_model
from models.data.batches import Batches, batch_hash
from models.data.shards import TokenData
from models.errors import UsageError, UserError
from models.evaluation.loss import Interrupted, Score, evaluate_loss
from models.files import write_json
from models.ops import check_impl, describe_ops
from models.presets import describe
from models.settings import RunSettings, flatten
from models.training.checkpoint import Checkpoint, Snapshot, latest_checkpoint, prune_checkpoints, save_checkpoint
from models.training.folder import check_free, claim, read_result, record, refuse_changes
from models.training.gradients import GradientSum
from models.training.progress import Metrics, ProgressLine, read_metrics, said_progress
from models.training.ranks import Ranks
from models.training.schedule import build_optimizer, schedule_step
from models.training.signals import Stopped, StopRequest
from models.vocab.fixed_data import FixedData, load_data
from models.vocab.heads import IGNORE

_log = logging.getLogger("tablefree.training")


def train_run(settings: RunSettings, data: TokenData, out: Path, resume: bool, label: str) -> dict[str, Any]:
    """Train one arm in folder ``out`` and return its result (also in ``out/result.json``). A finished run is not trained again.

    Raises UserError for what a user can mend, Stopped after a signal.
    """
    check_impl(settings.arm.impl, choose_device(settings.train.device))
    with contextlib.ExitStack() as claims:

        def look() -> dict[str, Any] | None:
            claims.enter_context(claim(out))
            check_free(out, settings, resume)
            return read_result(out, data.fingerprint)

        finished = Ranks.current().lead(look)
        if finished is not None:
            print(f"{label}  already finished: validation loss {finished['loss']:.4f}", flush=True)
            return finished
        return Run(settings, data, out, label).train()


def look_up(settings: RunSettings, data: TokenData) -> tuple[FixedData, ModelDescription]:
    """What the arm is made of. Raises UserError when its codes are missing or do not fit, or its body is impossible."""
    codes_path = Path(settings.data.codes) if settings.data.codes else data.folder / "codes.safetensors"
    fixed = load_data(settings.arm, data, codes_path)
    return fixed, describe(settings, fixed.size, fixed.code_bits)


class Run:
    """One arm, its optimizer, its data and its folder, on this process's rank."""

    def __init__(self, settings: RunSettings, data: TokenData, out: Path, label: str) -> None:
        self.settings, self.data, self.out, self.label = settings, data, out, label
        self.device, self.ranks = choose_device(settings.train.device), Ranks.current()
        if settings.train.batch_size < self.ranks.size:
            raise UsageError(f"train.batch_size ({settings.train.batch_size}) must give each of {self.ranks.size} processes a row")
        fixed, description = look_up(settings, data)
        self.model: LanguageModel = build_model(description, fixed, settings.train.seed).to(self.device)
        self.optimizer = build_optimizer(self.model, settings.optim)
        self.gradients = GradientSum(self.model.parameters(), self.ranks)
        self.batches = Batches(data.train, settings.data.seq_len, settings.train.seed)
        self.step, self.tokens = 0, 0
        self.facts = {"data": data.fingerprint, "tokenizer": data.tokenizer.fingerprint, "codes": fixed.codes_checksum}
        checkpoint = latest_checkpoint(out / "checkpoints")
        if checkpoint is not None:
            self._restore(checkpoint)
        self.ops = describe_ops(settings.arm, self.device)
        if self.ranks.size > 1:
            self._compare_ranks()
        session = {"device": str(self.device), "ops": self.ops, "from_step": self.step, "threads": torch.get_num_threads()}
        self.ranks.lead(lambda: record(out, settings, self.facts | session | {"ranks": self.ranks.size}))

    def _compare_ranks(self) -> None:
        """Raise UserError unless all ranks begin alike: a host with other files would train something else, unseen."""
        seen = hashlib.sha256(json.dumps([flatten(self.settings), self.facts], sort_keys=True).encode())
        self.ranks.require_equal("settings, data or codes", [int(seen.hexdigest()[:12], 16)])
        self.ranks.require_equal("checkpoint", [self.step, *(p.detach().double().sum().item() for p in self.model.parameters())])

    def _restore(self, checkpoint: Checkpoint) -> None:
        checkpoint.require_trainable()
        refuse_changes(checkpoint.settings, self.settings, checkpoint.path)
        for what, now in self.facts.items():
            if checkpoint.state[what] != now:
                raise UserError(f"{checkpoint.path}: trained with other {what} than these; give the old {what}, or another --out")
        logged = read_metrics(self.out / "metrics.jsonl")[: checkpoint.step]
        if len(logged) != checkpoint.step or any(row["step"] != i for i, row in enumerate(logged, start=1)):
            raise UserError(
                f"{self.out / 'metrics.jsonl'}: was cut or changed (it lacks steps that {checkpoint.path.name} is the result of); "
                "put the old file back, or give another --out"
            )
        checkpoint.load_into(self.model, self.optimizer)
        self.step, self.tokens = checkpoint.step, checkpoint.state["tokens"]
        before = checkpoint.state["ranks"]
        if before != self.ranks.size and self.ranks.leader:
            way = f"saved by {before} and continued by {self.ranks.size} processes"
            _log.warning("%s: %s: the same batches, but sums in another order, so not the same bits", checkpoint.path, way)

    def train(self) -> dict[str, Any]:
        """Run the remaining steps, score the whole validation text, write the result."""
        together = f", {self.ranks.size} processes" if self.ranks.size > 1 else ""
        print(f"{self.label}  {self.ops}, on {self.device}{together}", flush=True)
        metrics = Metrics(self.out / "metrics.jsonl" if self.ranks.leader else None, self.step)
        board = open_tensorboard(self.out) if self.settings.train.tensorboard and self.ranks.leader else None
        progress = ProgressLine(self.label, self.settings.train.steps)
        with contextlib.closing(progress), contextlib.closing(metrics), StopRequest() as stop:
            while self.step < self.settings.train.steps:
                row = self._step()
                self._evaluate_if_due(row, stop)
                metrics.write(row)
                if board:
                    self._to_tensorboard(board, row)
                progress.update(self.step, f"loss {row['loss']:.3f}  {row['tokens_per_second']:,.0f} tokens/s")
                self._save_if_due(metrics, stop)
            metrics.sync()
            self.save()
            progress.close()
            try:
                with said_progress(f"{self.label}  scoring the validation text") as show:
                    score = self.evaluate(0, stop, show)
            except Interrupted:
                raise Stopped(self.asked_to_stop(stop), self.step) from None
            result = self.ranks.lead(lambda: self._write_result(score))
            if number := self.asked_to_stop(stop):
                raise Stopped(number, self.step)
        print(f"{self.label}  validation loss {score.loss:.4f}  {result['tokens_per_second']:,.0f} tokens/s", flush=True)
        return result

    def asked_to_stop(self, stop: StopRequest) -> int:
        """The number of a signal that any rank got, else 0; all ranks ask at the same points, so all hear the same."""
        return self.ranks.highest(stop.number or 0)

    def _evaluate_if_due(self, row: dict[str, Any], stop: StopRequest) -> None:
        every, rows = self.settings.train.eval_every, self.settings.train.eval_rows
        if every and self.step % every == 0:
            # A signal ends the evaluation, and _save_if_due then the run.
            with contextlib.suppress(Interrupted):
                row["validation_loss"] = self.evaluate(rows, stop).loss

    def _save_if_due(self, metrics: Metrics, stop: StopRequest) -> None:
        every, number = self.settings.train.save_every, self.asked_to_stop(stop)
        if number or (every and self.step % every == 0):
            metrics.sync()  # a checkpoint must never be ahead of its log
            self.save()
            number = self.asked_to_stop(stop)  # again: a save may take long
        if number:
            raise Stopped(number, self.step)

    def _step(self) -> dict[str, Any]:
        """One optimizer step; returns its metrics row."""
        start, train, optim = time.perf_counter(), self.settings.train, self.settings.optim
        first = self.step * train.batch_size
        inputs, targets = self.batches.rows(first, train.batch_size)
        digest = batch_hash(inputs, targets)
        loss = self._backward(inputs, targets)
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip or float("inf")))
        if not (abs(loss) < float("inf") and norm < float("inf")):
            rows = f"rows {first} to {first + train.batch_size - 1}"
            raise UserError(
                f"step {self.step + 1}: the loss ({loss}) or the gradient norm ({norm}) is not finite, in batch {digest} ({rows}); "
                f"stopped before its update. Lower optim.lr, or look at those rows; the weights are those of step {self.step}"
            )
        rate = schedule_step(self.optimizer, self.step, train.steps, optim)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step, self.tokens = self.step + 1, self.tokens + targets.numel()
        seconds = time.perf_counter() - start
        return {
            "step": self.step,
            "loss": loss,
            "lr": rate,
            "grad_norm": norm,
            "tokens": self.tokens,
            "batch": digest,
            "seconds": seconds,
            "tokens_per_second": targets.numel() / seconds,
        }

    def _backward(self, inputs: Tensor, targets: Tensor) -> float:
        """Accumulate the step's gradient over the micro-batches of this rank's rows, and sum it over the ranks.

        Returns the whole step's loss, nats per valid target. Every rank knows the whole step's targets: their number needs no
        exchange.
        """
        rows, mine = self.settings.train.micro_batch_size or len(inputs), self.ranks.share(len(inputs))
        valid = int((targets != IGNORE).sum())
        total = torch.zeros((), device=self.device)
        parts = list(zip(inputs[mine].split(rows), targets[mine].split(rows), strict=True))
        for i, (part, part_targets) in enumerate(parts):
            with autocast(self.settings, self.device):
                loss = self.model.loss(part.to(self.device), part_targets.to(self.device), denominator=valid)
            with self.gradients.summed() if i == len(parts) - 1 else contextlib.nullcontext():
                loss.backward()
            total += loss.detach()
        return self.ranks.total([total.item()])[0]

    def evaluate(self, limit: int, stop: StopRequest, progress: Callable[[int, int], None] = lambda done, total: None) -> Score:
        """Score the validation text (``limit`` windows of it, evenly spaced; 0: all). Raises Interrupted after a signal."""
        rows = self.settings.train.micro_batch_size or self.settings.train.batch_size
        lengths, seq_len = self.data.tokenizer.byte_lengths(), self.settings.data.seq_len
        with autocast(self.settings, self.device):
            part = evaluate_loss(
                self.model, self.data.validation, lengths, seq_len, rows, limit, lambda: self.asked_to_stop(stop) > 0,
                self.data.counts, rank=self.ranks.rank, world_size=self.ranks.size, progress=progress,
            )  # fmt: skip
        score = part.with_sums(self.ranks.total(part.sums()))
        if not abs(score.nats) < float("inf"):
            raise UserError(f"step {self.step}: the validation loss is {score.loss}; lower optim.lr, or go back to a checkpoint")
        return score

    def save(self) -> None:
        """Write a checkpoint of this step and drop old ones. UserError, and nothing is written, when a weight is not finite."""
        self.ranks.lead(self._save)

    def _save(self) -> None:
        folder = self.out / "checkpoints"
        broken = [name for name, weight in self.model.named_parameters() if not weight.isfinite().all()]
        if broken:
            raise UserError(f"step {self.step}: its update left {broken[0]} with values that are not finite; lower optim.lr")
        state = {"step": self.step, "tokens": self.tokens, "ranks": self.ranks.size, **self.facts}
        snapshot = Snapshot(self.model, self.optimizer, state, asdict(self.settings), self.data.folder / "tokenizer.json")
        save_checkpoint(folder, snapshot)
        prune_checkpoints(folder, self.settings.train.keep_checkpoints)

    def _write_result(self, score: Score) -> dict[str, Any]:
        rows = read_metrics(self.out / "metrics.jsonl")
        step_seconds = statistics.median(row["seconds"] for row in rows)
        checkpoint = latest_checkpoint(self.out / "checkpoints")
        result = {
            **score.to_json(),
            **Account.of(self.model, self.settings.data.seq_len).to_json(),
            **self.facts,
            "steps": self.step,
            "tokens": self.tokens,
            "model_bytes": checkpoint.model_bytes,
            "step_seconds": step_seconds,
            "tokens_per_second": self.settings.train.batch_size * self.settings.data.seq_len / step_seconds,
        }
        write_json(self.out / "result.json", result)
        return result

    def _to_tensorboard(self, board: Any, row: dict[str, Any]) -> None:
        for name in ("loss", "lr", "grad_norm", "tokens_per_second", "validation_loss"):
            if name in row:
                board.add_scalar(name, row[name], row["step"])


def autocast(settings: RunSettings, device: torch.device) -> torch.autocast:
    """The arithmetic that ``train.dtype`` asks for."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.train.dtype == "bfloat16")


def choose_device(name: str) -> torch.device:
    """``auto`` is the GPU when there is one. Raises UsageError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros((), device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"train.device={name}: not usable here ({str(error).splitlines()[0]}); use auto or cpu") from None
    return device


def open_tensorboard(out: Path) -> Any:
    """A TensorBoard writer; UsageError when the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError("train.tensorboard=true needs the package: pip install tensorboard") from None
    return SummaryWriter(str(out / "tensorboard"))
