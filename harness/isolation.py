"""Functions called in a process of their own: one that faults, hangs or spoils the device costs its own call.

A `Worker` starts its process when it is first called, gives every call a time limit, and starts another process after
one that was lost, or whose CUDA context no longer answers. The process is a fresh Python, never a fork: a fork cannot
use CUDA once its parent has, and would share its parent's fate besides. What is called and what it returns travel as
pickles, functions by their names.

Ctrl-C reaches the caller only, which closes its workers; a worker whose caller has died ends by itself.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch

from .errors import one_line
from .options import LIMIT_S

START_LIMIT_S = 120.0
END_LIMIT_S = 10.0
WATCH_S = 1.0

Result = TypeVar("Result")


class Lost(Exception):
    """A call without a result. Its text says why, as what is to be said of the thing called."""


class TimedOut(Lost):
    """A call that was stopped because it took too long."""


class Caller(Protocol):
    """Where functions are called."""

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """What the function returns. Raises Lost when it gives no result."""

    def close(self) -> None:
        """Ends it, also from another thread: a call under way is lost, and none may follow."""


class Here:
    """This very process: for a debugger, and for a test that brings its own port."""

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """What the function returns. Raises Lost when it raised."""
        try:
            return function(*arguments)
        except Exception as error:
            raise Lost(f"raised {one_line(error)}") from error

    def close(self) -> None:
        """Nothing to end."""


class Worker:
    """A process for calls, one at a time.

    limit_s: seconds that one call may take. threads: how many threads PyTorch takes there, unless
    OMP_NUM_THREADS says so already; None for its own choice. environment: variables that it has besides ours.
    """

    def __init__(
        self,
        limit_s: float = LIMIT_S,
        threads: int | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._limit_s, self._threads, self._environment = limit_s, threads, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._closed = False
        self._starting = threading.Lock()

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """What the function returns there.

        Raises Lost when it raised, took longer than the limit, or its process died.
        """
        request = pickle.dumps((function, arguments))
        if self._process is None:
            self._start()
        try:
            self._connection.send_bytes(request)
            if not self._connection.poll(self._limit_s):
                self._end()
                raise TimedOut(f"took longer than {self._limit_s:g} s and was stopped")
            result, error, usable = self._connection.recv()
        except (EOFError, OSError) as died:
            raise Lost(f"its process {self._fate()}") from died
        if not usable:
            self._end()
        if error is not None:
            raise Lost(f"raised {error}")
        return result

    def close(self) -> None:
        """Kills the process, whatever it does."""
        with self._starting:
            self._closed = True
            process = self._process
        if process is not None:
            _kill(process)

    def _start(self) -> None:
        ours, theirs = Pipe()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        environment |= self._environment
        if self._threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(self._threads))
        with self._starting:
            if self._closed:
                raise Lost("was not called: its worker is closed")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from harness.isolation import serve; serve({theirs.fileno()})"],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what kernels print has no place among the tables
                start_new_session=True,  # out of Ctrl-C's reach, and killed with all that a compiler has started
            )
        theirs.close()
        self._connection = ours
        try:
            if not ours.poll(START_LIMIT_S):
                self._end()
                raise Lost(f"was not called: a worker process did not start within {START_LIMIT_S:g} s")
            ours.recv()
        except (EOFError, OSError) as died:
            raise Lost(f"was not called: a worker process {self._fate()} as it started") from died

    def _fate(self) -> str:
        """How the process ended by itself."""
        process = self._process
        assert process is not None
        try:
            status = process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            status = None
        self._end()
        if status is None:
            return "no longer answered"
        return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def _end(self) -> None:
        process, self._process = self._process, None
        self._connection.close()
        if process is not None:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and what it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_LIMIT_S)
    except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
        pass  # gone already; or held in the driver, and nobody can do more


def serve(descriptor: int) -> None:
    """The worker's side: answers the calls that come over the connection until its other end is closed."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    connection = Connection(descriptor)
    connection.send(None)
    while True:
        result, error = None, None
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments = pickle.loads(request)
            result = function(*arguments)
        except Exception as raised:
            error = one_line(raised)
        connection.send((result, error, _device_answers()))


def _end_with(parent: int) -> None:
    """Ends this process, and what it has started, when its parent has died."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os.killpg(0, signal.SIGKILL)


def _device_answers() -> bool:
    """Whether later calls can still use the GPU: after a fault in a kernel every call of CUDA raises."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


@contextmanager
def processes(count: int, limit_s: float, environment: Mapping[str, str]) -> Iterator[list[Worker]]:
    """So many workers of one thread each, which end with the context."""
    workers = [Worker(limit_s, 1, environment) for _ in range(count)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()
