"""The processes ("ranks") that torchrun starts to train one run together; a process alone is rank 0 of 1 and talks to nobody.

Rank 0, the leader, is the only one that writes and prints. Every wait for another rank ends: with that rank's answer, when its
connection closes, or after a timeout (``TABLEFREE_TIMEOUT`` seconds, 600 by default).
"""

from __future__ import annotations  # torch can be built without torch.distributed

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from models.errors import UsageError, UserError

TIMEOUT_VARIABLE, TIMEOUT = "TABLEFREE_TIMEOUT", 600.0
_FAILURES = "failures"  # key of the store: how many ranks have failed


class PeerLost(UserError):
    """Another rank ended or stopped answering."""


class LeaderFailed(UserError):
    """Rank 0 has an error to report; this rank has none of its own."""


@contextlib.contextmanager
def talking() -> Iterator[None]:
    """Around every exchange with other ranks: raises PeerLost for the library's many kinds of broken connections."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PeerLost(f"another process of this run ended or stopped answering ({reason}); continue with --resume") from error


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks. All of them must call the methods that exchange something, in the same order."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def current() -> Ranks:
        """The ranks of the surrounding ``joined`` block; outside of one, this process alone."""
        joined_others = dist.is_available() and dist.is_initialized()
        return Ranks(dist.get_rank(), dist.get_world_size()) if joined_others else Ranks()

    @property
    def leader(self) -> bool:
        return self.rank == 0

    def share(self, rows: int) -> slice:
        """This rank's part of ``rows`` rows: they are dealt in order, sizes differ by one at most."""
        return slice(self.rank * rows // self.size, (self.rank + 1) * rows // self.size)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The ``values`` (fp64) of every rank, by rank: the same lists everywhere."""
        if self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        with talking():
            dist.all_gather(found, own)
        return [tensor.tolist() for tensor in found]

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, in their order: equal to the bit everywhere."""
        return [sum(column[1:], column[0]) for column in zip(*self.gather(values), strict=True)]

    def highest(self, value: int) -> int:
        """The largest ``value`` of any rank."""
        return int(max(row[0] for row in self.gather([value])))

    def require_equal(self, what: str, values: Sequence[float]) -> None:
        """Raise UserError unless every rank has the same ``values``."""
        for rank, theirs in enumerate(found := self.gather(values)):
            if theirs != found[0]:
                raise UserError(f"rank {rank} has other {what} than rank 0: all processes must see the same files and settings")

    def lead(self, action: Callable[[], Any]) -> Any:
        """What ``action`` returns on rank 0 (a value that can be pickled), on every rank; the others wait for it.

        Its error is raised on rank 0, and LeaderFailed on the others.
        """
        if self.size == 1:
            return action()
        try:
            own = (True, action()) if self.leader else (False, None)
        except BaseException:
            with contextlib.suppress(PeerLost):  # this rank's own error is the one to report
                _from_leader((False, None))
            raise
        done, value = _from_leader(own)
        if not done:
            raise LeaderFailed("rank 0 failed")
        return value


def _from_leader(own: tuple[bool, Any]) -> tuple[bool, Any]:
    """What rank 0 calls this with, on every rank."""
    box = [own]
    with talking():
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Join the other processes that torchrun started, for the block; a process alone goes on as it is.

    Inside, only rank 0 prints and logs. An error on any rank ends all of them, and one of them reports it: the first to fail
    raises, the others leave silently with the same kind of exit code.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    store = _connect()
    try:
        with contextlib.ExitStack() as stack:
            if not Ranks.current().leader:
                nowhere = stack.enter_context(open(os.devnull, "w"))  # noqa: PTH123
                stack.enter_context(contextlib.redirect_stdout(nowhere))
                stack.callback(logging.disable, logging.NOTSET)
                logging.disable(logging.WARNING)
            yield
        with talking():
            dist.barrier()  # a rank that leaves while another still talks to it would look like a failure
    except BaseException as error:
        code = _exit_code(error)
        # What the others never answer must not keep this process from ending: no destructors, no waiting threads.
        atexit.register(_leave, code)
        if isinstance(error, LeaderFailed) or not _is_first(store):
            raise SystemExit(code) from None
        raise
    dist.destroy_process_group()


def _connect() -> dist.Store:
    timeout = timedelta(seconds=_timeout())
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        # CPU tensors (losses, signals) go through gloo even where gradients go through NCCL: reading them back waits for no stream.
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the processes of this run did not find each other ({error}); start them with torchrun") from error
    return dist.PrefixStore("tablefree", store)


def _timeout() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE, str(TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise UsageError(f"{TIMEOUT_VARIABLE} must be a number of seconds above 0, got {text!r}")
    return seconds


def _is_first(store: dist.Store) -> bool:
    """Whether no other rank has failed before. True too when the store is gone, and with it who could say."""
    try:
        return store.add(_FAILURES, 1) == 1
    except RuntimeError:
        return True


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
