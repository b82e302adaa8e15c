# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Flags of this package for Megatron's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

GONE = {
    "--dpu-grace": "--dpu-quorum REPLICAS@SECONDS has both",
    "--dpu-optimizer-clip": "servers try steps, and stop by themselves where most are clipped",
    "--dpu-outer-after": "--dpu-outer STEPS,after=N",
    "--dpu-outer-delay": "--dpu-outer STEPS,delay=N",
    "--dpu-outer-fragments": "--dpu-outer STEPS,fragments=N",
    "--dpu-outer-lr": "--dpu-outer STEPS,lr=X",
    "--dpu-outer-momentum": "--dpu-outer STEPS,momentum=X",
    "--dpu-outer-steps": "--dpu-outer STEPS",
    "--dpu-reduce-feedback": "--dpu-reduce-wire-dtype decides: int4 has it, and int8 has not",
    "--dpu-reduce-route": "--dpu-reduce-backend",
}
"""Removed flags, and their replacements."""

PRESETS = {
    "own-hosts": {
        "use_dpu_reduce": True,
        "dpu_reduce_wire_dtype": "int8",
        "dpu_optimizer": True,
        "overlap_grad_reduce": True,
    },
}
"""Presets, each with the arguments for which it stands."""


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add this package's flags to Megatron's group of distributed arguments."""
    group.add_argument(
        "--use-dpu-reduce",
        action="store_true",
        default=False,
        help="If set, sum data-parallel gradients through BytePS parameter servers where that is "
        "faster than an all-reduce or reduce-scatter. Needs the package byteps; without a "
        "scheduler address (DMLC_PS_ROOT_URI) the servers are started next to the ranks.",
    )
    group.add_argument(
        "--dpu-preset",
        action=_Preset,
        choices=PRESETS,
        default=None,
        help="own-hosts: what gains most without another machine, --use-dpu-reduce "
        "--dpu-reduce-wire-dtype int8 --dpu-optimizer --overlap-grad-reduce. Another "
        "--dpu-reduce-wire-dtype wins.",
    )
    group.add_argument(
        "--dpu-reduce-wire-dtype",
        choices=["bf16", "int8", "int4"],
        default=None,
        help="Send gradients to the BytePS servers and back in this type: fp32 as bf16, any as "
        "blocks of 128 values with one scale (int8, int4). Servers still add them in fp32. "
        "Default: the type of the gradients.",
    )
    group.add_argument(
        "--dpu-reduce-keep-bf16",
        nargs="+",
        default=None,
        metavar="PATTERN|BYTES",
        help="With int8 and int4: parameters whose gradients are sent as bf16, in addition to "
        "norms, biases, routers and tensors of less than 64 KiB. A number sets these bytes.",
    )
    group.add_argument(
        "--dpu-reduce-backend",
        choices=["auto", "flat", "node-first", "collective"],
        default="auto",
        help="How --use-dpu-reduce sums gradients. flat: every rank pushes whole buckets to the "
        "servers. node-first: the ranks of a host sum first and push a part each. collective: as "
        "without BytePS. auto (default): for each bucket whichever needs the least time on the "
        "links; a table at the start says why.",
    )
    group.add_argument(
        "--dpu-optimizer",
        action="store_true",
        default=False,
        help="The servers keep fp32 parameters and the state of the optimizer (adam or sgd), and "
        "update. Gradients go up and parameters come down; ranks hold no optimizer state. Takes "
        "the place of --use-distributed-optimizer and asks for --use-dpu-reduce. With "
        "--overlap-param-gather a step returns while parameters come down, and each module waits "
        "for its own.",
    )
    group.add_argument(
        "--dpu-outer",
        default=None,
        metavar="STEPS[,NAME=VALUE...]",
        help="With replicas (BYTEPS_REPLICA): each steps its own optimizer, and all exchange "
        "parameters once in STEPS steps (DiLoCo). One job makes outer steps too. lr, momentum=0.9: "
        "of the outer steps; lr is 0.4 for one job, 0.6 for 2 to 4 replicas, 0.8 for more. "
        "dtype=bfloat16: of what replicas send; also float32, int8 and int4. after=0: steps "
        "before, in each of which gradients are summed, and which fill the momentum. delay=0: "
        "steps that an exchange may take, while replicas go on. fragments=1: parts of the model "
        "that are exchanged at different steps. Default: gradients are summed in each step.",
    )
    group.add_argument(
        "--dpu-quorum",
        default=None,
        metavar="REPLICAS@SECONDS",
        help="With replicas: once so many of them wait, the others have so long. One that is later "
        "is removed, and joins again. With --dpu-outer one that is slow leaves out steps "
        "before. The seconds must be more than replicas differ in the time of a step, evaluation "
        "or checkpoint. Default: replicas wait for each other.",
    )
    group.add_argument(
        "--dpu-feedback-per-rank",
        action="store_true",
        default=False,
        help="With int4: checkpoints have what rounding has lost of each rank, 2 bytes per "
        "parameter and rank, instead of the mean; so saving one does not change a bit of the steps "
        "after.",
    )
    for flag in GONE:
        group.add_argument(
            flag, action=_Gone, nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


class _Preset(argparse.Action):
    """Sets the arguments of a preset, except those on the command line."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        del parser, option_string
        setattr(namespace, self.dest, values)
        for name, value in PRESETS[str(values)].items():
            if not getattr(namespace, name, None):
                setattr(namespace, name, value)


class _Gone(argparse.Action):
    """Rejects a removed flag and names its replacement."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        del namespace, values
        flag = self.option_strings[0]
        parser.error(f"{flag} is gone: {GONE[flag]}")
