"""Processes that begin with torch and Megatron imported, in milliseconds: forked from a server that all tests of a pytest
process share.  pytest's own process stays clean."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext

from torch.multiprocessing import start_processes


def forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Whoever starts the server decides what it imports, so this is what all of them need.
    context.set_forkserver_preload(["tests.checkpoints_conv.jobs", "megatron_drmas.actor.policy_actor"])
    return context


def run_on_ranks(job: Callable, count: int, *args) -> None:
    """`job(rank, *args)` in `count` processes; the first error of any of them is raised here."""
    forkserver()
    start_processes(job, args, nprocs=count, start_method="forkserver")
