# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Megatron's own parsing and checking of arguments, on a machine without a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


class NotMegatrons(Exception):
    """Megatron itself does not take the arguments; the text is its own."""


def parse(
    words: Sequence[str],
    *,
    world: int,
    architecture: int = 9,
    environment: Mapping[str, str] | None = None,
) -> Namespace:
    """Parse and check arguments of a training script as Megatron does, with what it derives.

    What it asks of the machine is answered as a GPU and the newest Transformer Engine would.
    Arguments that Megatron does not know are taken for those of the script.

    Args:
        words: of the command line, without the script.
        world: ranks.
        architecture: of the GPUs: 9 for Hopper, 10 for Blackwell.
        environment: variables that the script sets. Where they leave CUDA_DEVICE_MAX_CONNECTIONS
            open, Megatron finds the value that it demands.

    Raises:
        NotMegatrons: it refuses them.
    """
    variables = {"RANK": "0", "LOCAL_RANK": "0", **(environment or {}), "WORLD_SIZE": str(world)}
    tries = [{}] if _CONNECTIONS in variables else [{_CONNECTIONS: "1"}, {_CONNECTIONS: "32"}]
    reasons = []
    for more in tries:
        try:
            return _parse(words, {**variables, **more}, architecture)
        except NotMegatrons as error:
            reasons.append(error)
    # What the second one says is about that variable alone where the first got past it.
    raise next((one for one in reasons if _CONNECTIONS not in str(one)), reasons[0])


def _parse(words: Sequence[str], variables: Mapping[str, str], architecture: int) -> Namespace:
    from megatron.training import arguments, cpu_platform

    told = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables))
        stack.enter_context(mock.patch.object(sys, "argv", ["check", *words]))
        stack.enter_context(mock.patch.object(cpu_platform, "is_wanted", lambda: False))
        for name, value in _answers(architecture).items():
            if hasattr(arguments, name):
                stack.enter_context(mock.patch.object(arguments, name, value))
        capability = mock.patch("torch.cuda.get_device_capability", lambda *_: (architecture, 0))
        stack.enter_context(capability)
        stack.enter_context(_modules_that_are_asked_for())
        stack.enter_context(contextlib.redirect_stdout(told))
        stack.enter_context(contextlib.redirect_stderr(told))
        stack.enter_context(_no_warnings())
        try:
            args = arguments.parse_args(ignore_unknown_args=True)
            _vocabulary(args)
            arguments.validate_args(args)
        except SystemExit:
            lines = told.getvalue().strip().splitlines() or ["it ended"]
            raise NotMegatrons(lines[-1]) from None
        except Exception as error:
            raise NotMegatrons(_text(error)) from error
    return args


def _answers(architecture: int) -> dict[str, Any]:
    """What the module that checks arguments asks of the machine, by the names it has imported."""
    answers: dict[str, Any] = {"get_device_arch_version": lambda: architecture}
    if importlib.util.find_spec("transformer_engine") is None:
        answers["is_te_min_version"] = lambda *_, **__: True
    if importlib.util.find_spec("flashinfer") is None:
        answers["is_flashinfer_min_version"] = lambda *_, **__: True
    return answers


@contextlib.contextmanager
def _modules_that_are_asked_for() -> Iterator[None]:
    """Optional packages that a recipe names, where they are missing: they are imported alone."""
    name = "nvidia_resiliency_ext"
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        yield
        return
    names = [
        ".".join([name, *rest[:depth]])
        for rest in (["checkpointing", "local", "ckpt_managers", "local_manager"],)
        for depth in range(len(rest) + 1)
    ]
    with mock.patch.dict(sys.modules, {one: mock.MagicMock(name=one) for one in names}):
        yield


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _vocabulary(args: Namespace) -> None:
    """Megatron pads the vocabulary that its tokenizer has, which is not read here."""
    if getattr(args, "padded_vocab_size", None) is None and getattr(args, "vocab_size", None):
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple


def _text(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text or f"{type(error).__name__} in {_place(error)}"


def _place(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"line {trace.tb_lineno}" if trace is not None else "its checks"
