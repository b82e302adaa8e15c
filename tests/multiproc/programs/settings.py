"""What bps.init() says to settings that are bad."""

from __future__ import annotations

import os
import re

import byteps.torch as bps
import torch

from tests.multiproc.programs.job import Job


def bad_values(job: Job) -> None:
    """Each (variable, value) of args must make init raise an error that names both."""
    for name, value in job.args["bad"]:
        before = os.environ.get(name)
        os.environ[name] = value
        label = f"{name}={value!r}"
        with job.check(label):
            try:
                bps.init()
            except bps.BytePSError as error:
                text = str(error)
                assert name in text, f"does not name {name}: {text}"
                assert value in text, f"does not show {value!r}: {text}"
            else:
                bps.shutdown()
                raise AssertionError("was accepted")
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def disagreeing_ranks(job: Job) -> None:
    """torchrun's variables and BytePS's own must not contradict each other."""
    for name, value in (("DMLC_WORKER_ID", "1"), ("DMLC_NUM_WORKER", "3")):
        before = os.environ.pop(name, None)
        os.environ[name] = value
        with job.check(name):
            try:
                bps.init()
            except bps.BytePSError as error:
                assert re.search(name, str(error)), str(error)
                assert re.search("RANK|WORLD_SIZE", str(error)), str(error)
            else:
                bps.shutdown()
                raise AssertionError("was accepted")
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def second_try(job: Job) -> None:
    """init works once what was wrong is put right."""
    os.environ["BYTEPS_PUSH_THREAD"] = "many"
    with job.check_raises("bad value", bps.BytePSError, "BYTEPS_PUSH_THREAD"):
        bps.init()
    with job.check("not initialised"):
        assert bps.is_initialized() is False
    os.environ["BYTEPS_PUSH_THREAD"] = "3"
    bps.init()
    with job.check("sum"):
        assert (bps.push_pull(torch.ones(7), average=False, name="x") == job.size).all()
    bps.shutdown()
