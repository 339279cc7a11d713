"""Calling a stage from a program or a notebook, which goes on living after it."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import logging
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

T = TypeVar("T")


def call(work: Callable[[], T]) -> T:
    """What ``work`` returns. What it sets for its process, a command may leave behind; here it is put back.

    Stages use ``asyncio.run``, which cannot run inside a running event loop, such as a notebook's: there, ``work`` has
    a thread of its own, and this one waits. Ctrl-C stops it with a ``KeyboardInterrupt`` everywhere.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _restored(work)
    return _in_a_thread(lambda: _restored(work))


def _in_a_thread(work: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[BaseException] = []
    over = threading.Event()  # not join(), which cannot be called again once Ctrl-C has interrupted it

    def target() -> None:
        try:
            results.append(work())
        except BaseException as error:  # told to the caller, whatever it is
            errors.append(error)
        finally:
            over.set()

    # with the context of the caller, by which a notebook knows the cell that output belongs to
    thread = threading.Thread(target=contextvars.copy_context().run, args=(target,), daemon=True)
    try:
        thread.start()
        over.wait()
    except KeyboardInterrupt:
        if thread.ident is None:
            raise
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
        over.wait()
    if errors:
        raise errors[0]
    return results[0]


def _restored(work: Callable[[], T]) -> T:
    try:
        with _process_as_it_was():
            return work()
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning makes a plain exit of Ctrl-C
            raise KeyboardInterrupt from None
        raise


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Puts back what stages set for the whole process: environment, random states, threads, warnings, verbosity."""
    environment, numbers, arrays = dict(os.environ), random.getstate(), np.random.get_state()
    tensors, threads = torch.get_rng_state(), torch.get_num_threads()
    log = logging.getLogger("lightning.pytorch")
    level, bars = log.level, transformers_logging.is_progress_bar_enabled()
    try:
        # of oneDNN, read when torch first multiplies: its cache would grow to gigabytes with the shapes of text
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
        with warnings.catch_warnings():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        random.setstate(numbers)
        np.random.set_state(arrays)
        torch.set_rng_state(tensors)
        torch.set_num_threads(threads)
        log.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
