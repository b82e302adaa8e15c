"""A rank's whole training state as Megatron describes it for a checkpoint, without the disk.

Parameters, optimizer, scheduler, random numbers, iteration and samples: what ``save_checkpoint``
would write, each rank its own part. It is for a rank of the same number in the same layout.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

from .memory import VARIABLE, Keeper, fetch

_thread: threading.Thread | None = None


def install() -> None:
    """Have Megatron's loop hand in snapshots, and start from one, as the environment says.

    Raises:
        ValueError: it asks for that, and Megatron is not there.
    """
    if not os.environ.get(VARIABLE):
        return
    try:
        from megatron.training import checkpointing, training
    except ModuleNotFoundError as error:
        raise ValueError(f"training state is kept of Megatron's loop alone: {error}") from error

    asked = json.loads(os.environ[VARIABLE])
    step, name = asked["restore"], asked["socket"]
    training.checkpoint_and_decide_exit = _saving(
        training.checkpoint_and_decide_exit, name, asked["interval"]
    )
    if step is not None:
        state = _read(fetch(name, step))
        checkpointing._load_base_checkpoint = functools.partial(_from_memory, state)
        training.load_checkpoint = _all_of_it(training.load_checkpoint)


def finish() -> None:
    """Wait until the last snapshot has been handed in."""
    if _thread is not None:
        _thread.join()


def _saving(function: Callable[..., Any], name: str, interval: int) -> Callable[..., Any]:
    """What Megatron calls after each step, taking a snapshot before it where one is due.

    One is due whenever a checkpoint is: the newest state is always in memory.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def save_and_decide(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        values = signature.bind(*args, **kwargs).arguments
        settings, step = get_args(), values["iteration"]
        on_disk = settings.save_interval if settings.save else None
        if any(every and step % every == 0 for every in (interval, on_disk)):
            _hand_in(name, step, snapshot(values))
        return function(*args, **kwargs)

    return save_and_decide


def _hand_in(name: str, step: int, state: dict[str, Any]) -> None:
    """In the background; one after the other, so that all ranks have the one before."""
    global _thread
    finish()

    def send() -> None:
        import torch

        try:
            with Keeper(name, step) as target:
                torch.save(state, cast(IO[bytes], target))  # which it writes to and flushes
                target.finish()
        except (OSError, EOFError) as error:
            # The job's end, or that of the actor: with it this rank ends as well.
            print(f"the state of step {step} was not kept: {error}", flush=True)

    _thread = threading.Thread(target=send, name="snapshot", daemon=True)
    _thread.start()


@contextlib.contextmanager
def _settings(**values: Any) -> Iterator[Any]:
    """Megatron's arguments, some of them changed meanwhile."""
    from megatron.training import get_args

    settings = get_args()
    before = {name: getattr(settings, name) for name in values if hasattr(settings, name)}
    vars(settings).update(values)
    try:
        yield settings
    finally:
        vars(settings).update(before)


def snapshot(values: dict[str, Any]) -> dict[str, Any]:
    """A copy in host memory of this rank's state; all ranks call it after the same step.

    Args:
        values: of Megatron's loop, by the names that ``checkpoint_and_decide_exit`` gives them.

    Returns:
        ``common``: what no rank shares with another. ``shards``: by ``_identity``, a tensor on the
        CPU or another object.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.utils import _clean_metadata_for_serialization
    from megatron.core.distributed import dpu_reduce
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import checkpointing, training

    model = checkpointing.unwrap_model(values["model"])
    groups = getattr(model[0], "pg_collection", None)
    of = functools.partial(getattr, groups)
    data = of("dp_cp_gtp_remat", None)
    with _settings(
        ckpt_format="torch_dist",
        no_save_optim=False,
        no_save_rng=False,
        dist_ckpt_optim_fully_reshardable=False,
    ) as settings:
        if training.should_disable_forward_pre_hook(settings):
            training.force_param_sync(values["model"], optimizer=values["optimizer"])
        metadata = checkpointing._build_sharded_state_dict_metadata(settings, dp_cp_group=data)
        # What a rank is given back is what it has saved.
        metadata["dpu_optimizer_whole"] = True
        random_numbers = checkpointing.get_rng_state(
            settings.ckpt_format,
            of("tp", None) or checkpointing.mpu.get_tensor_model_parallel_group(),
            of("pp", None) or checkpointing.mpu.get_pipeline_model_parallel_group(),
            dp_cp_group=data,
            dp_group=of("dp", None),
            key_prefix=getattr(model[0], "rng_state_key_prefix", ""),
        )
        state = checkpointing.generate_state_dict(
            settings,
            model,
            values["optimizer"],
            values["opt_param_scheduler"],
            random_numbers,
            iteration=values["iteration"],
            optim_sd_kwargs={"metadata": metadata},
            model_sd_kwargs={"metadata": metadata},
            rerun_state=get_rerun_state_machine().state_dict(
                data_iterator=values["train_data_iterator"], ckpt_format=settings.ckpt_format
            ),
        )
        dpu_reduce.save_feedback(settings, state)
        name = "num_floating_point_operations_so_far"
        state[name] = values[name]
        state["content_metadata"] = _clean_metadata_for_serialization(metadata)
        shards, common = save_preprocess(state, validate_access_integrity=False)
        return {
            "common": copy.deepcopy(common),
            "shards": {_identity(one): _copied(one.data) for one in nested_values(shards)},
        }


def _identity(shard: Any) -> tuple[Any, ...]:
    """Tells one shard of a rank from its others, whatever object describes it."""
    part = getattr(shard, "flattened_range", None)
    return (shard.key, *shard.global_offset, *((part.start, part.stop) if part else ()))


def _copied(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    return copy.deepcopy(value)


def _read(data: bytes) -> dict[str, Any]:
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _from_memory(
    state: dict[str, Any],
    load_dir: str | None,
    args: Any,
    rank0: bool = False,
    sharded_state_dict: dict[str, Any] | None = None,
    **_: Any,
) -> tuple[dict[str, Any], str, bool, Any]:
    """In place of Megatron's reading of a checkpoint: what this rank's snapshot holds."""
    from megatron.training import checkpointing

    found = copy.deepcopy(state["common"])
    checkpointing.set_loaded_iteration(found["iteration"])
    if not rank0:
        assert sharded_state_dict is not None  # Megatron leaves it out for rank0 alone
        found = _fill(found, state["shards"], sharded_state_dict)
    return found, "memory", False, checkpointing.CheckpointType.GLOBAL


def _fill(common: dict[str, Any], shards: dict[Any, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """The state that ``wanted`` describes: each shard's saved value in its place.

    Raises:
        LookupError: one was not saved; the layout is another one.
    """
    import torch
    from megatron.core.dist_checkpointing import dict_utils, mapping, utils
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

    def value(shard: Any) -> Any:
        saved = shards.get(_identity(shard), shards)
        if saved is shards:
            raise LookupError(f"the state in memory lacks {_identity(shard)}")
        if not isinstance(saved, torch.Tensor):
            return copy.deepcopy(saved)
        # A copy: the optimizer may take the tensor itself for its own.
        like = shard.data
        return saved.to("cpu" if like is None else like.device, copy=True)

    wanted, own, factories = load_preprocess(wanted)
    dict_utils.merge(common, own)
    asked, _ = utils.extract_sharded_base(wanted)
    dict_utils.merge(common, dict_utils.dict_list_map_outplace(value, asked))
    return mapping.apply_factory_merges(common, factories)


def _all_of_it(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's loading of all that there is: flags for the job's first start do not hold."""

    @functools.wraps(load_checkpoint)
    def load(*args: Any, **kwargs: Any) -> Any:
        with _settings(
            ckpt_format="torch_dist",
            finetune=False,
            no_load_optim=False,
            no_load_rng=False,
            no_save_optim=False,
            no_save_rng=False,
            pretrained_checkpoint=None,
            override_ckpt_iteration=None,
        ):
            return load_checkpoint(*args, **kwargs)

    return load
