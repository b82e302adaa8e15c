"""Training state in the memory of actors, which outlive the ranks that it belongs to.

A rank gives its actor a *snapshot*: the bytes of its training state after a step. The actor keeps
it, and sends a copy to a peer's actor, on another machine if possible. When both have all of it,
the actor confirms it to the rank. The driver compares the snapshots of all actors: when every rank
has a complete snapshot of a step, older ones are dropped.

Rank and actor use an abstract Unix socket. A rank sends a JSON line, ``{"do": "keep", "step": N}``
followed by chunks, or ``{"do": "fetch", "step": N}``, which is answered with chunks. A chunk is its
length (8 bytes), then its bytes. A chunk of length 0 is the end; a snapshot without it is
incomplete, because the rank was killed while sending.

In a rank, `install` makes Megatron's loop hand in snapshots. They contain the same state as a
Megatron checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BufferedRWPair
from typing import IO, Any, cast

CHUNK_BYTES = 32 << 20
VARIABLE = "MEGATRON_BYTEPS_MEMORY"
"""Environment variable for ranks, JSON: ``socket``, ``interval`` and ``restore`` (a step,
or null)."""
_LENGTH = struct.Struct("!Q")


@dataclass
class _Snapshot:
    chunks: list[bytes] = field(default_factory=list)
    whole: bool = False


class Snapshots:
    """Snapshots in an actor: its own rank's, and copies of a peer's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int, int], _Snapshot] = {}
        self._life = ("", -1)

    def begin(self, job: str, number: int, step: int | None) -> None:
        """Start a generation from this step (None: from no snapshot); drop all other snapshots."""
        with self._lock:
            self._life = (job, number)
            self._drop(lambda key: key[0] != job or key[2] != step)

    def add(
        self, job: str, number: int | None, rank: int, step: int, index: int, chunk: bytes
    ) -> None:
        """Add a chunk of a snapshot; an empty chunk ends it.

        ``number`` is the generation of the snapshot. Chunks of an earlier generation are ignored,
        since ranks repeat those steps. None: a snapshot from which the next generation starts.
        """
        with self._lock:
            if number is not None and (job, number) != self._life:
                return
            key = (job, rank, step)
            if index == 0:
                self._held[key] = _Snapshot()
            snapshot = self._held[key]
            if chunk:
                snapshot.chunks.append(chunk)
            else:
                snapshot.whole = True

    def drop_before(self, step: int) -> None:
        """Drop snapshots older than this step, of which every rank has a complete one."""
        with self._lock:
            self._drop(lambda key: key[2] < step)

    def _drop(self, needless: Callable[[tuple[str, int, int]], bool]) -> None:
        self._held = {key: one for key, one in self._held.items() if not needless(key)}

    def whole(self, job: str) -> dict[tuple[int, int], int]:
        """Return the bytes of each complete snapshot, by (rank, step)."""
        with self._lock:
            return {
                (rank, step): sum(map(len, one.chunks))
                for (of, rank, step), one in self._held.items()
                if of == job and one.whole
            }

    def chunks(self, job: str, rank: int, step: int) -> list[bytes]:
        """Return the chunks of a complete snapshot. Raises LookupError if there is none."""
        with self._lock:
            snapshot = self._held.get((job, rank, step))
            if snapshot is None or not snapshot.whole:
                raise LookupError(f"no whole snapshot of rank {rank}, step {step}")
            return list(snapshot.chunks)


class Port:
    """Socket on which an actor's rank hands in its snapshots, and fetches one."""

    def __init__(
        self, keep: Callable[[int, Iterator[bytes]], None], fetch: Callable[[int], list[bytes]]
    ) -> None:
        """``keep`` gets a step and its chunks, an empty chunk last; ``fetch`` returns a step's
        chunks."""
        self._keep, self._fetch = keep, fetch
        # Abstract, so that a killed actor leaves no file behind.
        self.name = f"megatron-byteps-ray-{os.getpid()}-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_address(self.name))
        self._listener.listen(4)
        threading.Thread(target=self._serve, name="snapshots", daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        # A rank that ends during a transfer needs no answer, and its snapshot does not count.
        with connection, contextlib.suppress(ConnectionError, EOFError):
            if struct.unpack("3i", credentials)[1] != os.getuid():
                return
            with connection.makefile("rwb") as stream:
                asked = json.loads(stream.readline())
                if asked["do"] == "keep":
                    self._keep(asked["step"], _read_chunks(stream))
                    stream.write(b"kept\n")
                else:
                    for chunk in self._fetch(asked["step"]):
                        _write_chunk(stream, chunk)
                    _write_chunk(stream, b"")


def _address(name: str) -> str:
    return "\0" + name


def _read_exactly(stream: BufferedRWPair, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _read_chunks(stream: BufferedRWPair) -> Iterator[bytes]:
    """Yield all chunks including the empty one. Raises EOFError if that is missing."""
    while True:
        (length,) = _LENGTH.unpack(_read_exactly(stream, _LENGTH.size))
        yield _read_exactly(stream, length)
        if length == 0:
            return


def _write_chunk(stream: BufferedRWPair, chunk: bytes | bytearray) -> None:
    stream.write(_LENGTH.pack(len(chunk)))
    stream.write(chunk)


class Keeper:
    """A rank's end: a file to which a snapshot is written, in a ``with`` statement."""

    def __init__(self, name: str, step: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(_address(name))
        self._stream = self._socket.makefile("rwb")
        self._stream.write(json.dumps({"do": "keep", "step": step}).encode() + b"\n")
        self._pending = bytearray()

    def write(self, data: Any) -> int:
        """Write like a file."""
        view = memoryview(data).cast("B")
        taken = 0
        while taken < len(view):
            part = view[taken : taken + CHUNK_BYTES - len(self._pending)]
            self._pending += part
            taken += len(part)
            if len(self._pending) == CHUNK_BYTES:
                _write_chunk(self._stream, self._pending)
                self._pending = bytearray()
        return len(view)

    def flush(self) -> None:
        """Flush like a file."""
        self._stream.flush()

    def finish(self) -> None:
        """Wait until actor and peer have the whole snapshot. Raises EOFError if they fail."""
        if self._pending:
            _write_chunk(self._stream, self._pending)
        _write_chunk(self._stream, b"")
        self._stream.flush()
        if self._stream.readline() != b"kept\n":
            raise EOFError("the actor did not keep the snapshot")

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()
        self._socket.close()


def fetch(name: str, step: int) -> bytes:
    """In a rank: return the bytes of its snapshot of this step.

    Raises:
        LookupError: its actor does not have the snapshot.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(_address(name))
        with connection.makefile("rwb") as stream:
            stream.write(json.dumps({"do": "fetch", "step": step}).encode() + b"\n")
            stream.flush()
            try:
                return b"".join(_read_chunks(stream))
            except EOFError:
                raise LookupError(f"the actor has no state of step {step}") from None


_thread: threading.Thread | None = None


def install() -> None:
    """Make Megatron's loop hand in snapshots, and start from one, if the environment asks for it.

    Raises:
        ValueError: the environment asks for it, but Megatron is not installed.
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
        state = _unpacked(fetch(name, step))
        checkpointing._load_base_checkpoint = functools.partial(_from_memory, state)
        training.load_checkpoint = _all_of_it(training.load_checkpoint)


def finish() -> None:
    """Wait until the last snapshot has been handed in."""
    if _thread is not None:
        _thread.join()


def _saving(function: Callable[..., Any], name: str, interval: int) -> Callable[..., Any]:
    """Wrap the function that Megatron calls after each step: first take a snapshot if one is due.

    A snapshot is also due before each checkpoint, so that memory always has the newest state.
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
    """Hand in a snapshot in the background, after the one before, so that all ranks have that."""
    global _thread
    finish()

    def send() -> None:
        import torch

        try:
            with Keeper(name, step) as target:
                # torch.save only writes to it and flushes it.
                torch.save(state, cast(IO[bytes], target))
                target.finish()
        except (OSError, EOFError) as error:
            # The job or the actor has ended; then this rank ends as well.
            print(f"the state of step {step} was not kept: {error}", flush=True)

    _thread = threading.Thread(target=send, name="snapshot", daemon=True)
    _thread.start()


@contextlib.contextmanager
def _settings(**values: Any) -> Iterator[Any]:
    """Context with Megatron's arguments, a few of them changed."""
    from megatron.training import get_args

    settings = get_args()
    before = {name: getattr(settings, name) for name in values if hasattr(settings, name)}
    vars(settings).update(values)
    try:
        yield settings
    finally:
        vars(settings).update(before)


def snapshot(values: dict[str, Any]) -> dict[str, Any]:
    """Copy this rank's state to host memory; all ranks call this after the same step.

    Args:
        values: values of Megatron's loop, by the parameter names of ``checkpoint_and_decide_exit``.

    Returns:
        ``common``: unsharded state. ``shards``: by ``_identity``, a tensor on the CPU or another
        object.
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
        # Each rank gets back exactly its own state.
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
    """Identify a shard among a rank's shards, regardless of the type of object that
    describes it."""
    part = getattr(shard, "flattened_range", None)
    return (shard.key, *shard.global_offset, *((part.start, part.stop) if part else ()))


def _copied(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    return copy.deepcopy(value)


def _unpacked(data: bytes) -> dict[str, Any]:
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
    """Replace Megatron's reading of a checkpoint: return the content of this rank's snapshot."""
    from megatron.training import checkpointing

    found = copy.deepcopy(state["common"])
    checkpointing.set_loaded_iteration(found["iteration"])
    if not rank0:
        assert sharded_state_dict is not None  # Megatron omits it only for rank0.
        found = _fill(found, state["shards"], sharded_state_dict)
    return found, "memory", False, checkpointing.CheckpointType.GLOBAL


def _fill(common: dict[str, Any], shards: dict[Any, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the state that ``wanted`` describes, with each shard's saved value.

    Raises:
        LookupError: a shard was not saved, because the layout differs.
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
        # A copy, because the optimizer may adopt the tensor itself.
        like = shard.data
        return saved.to("cpu" if like is None else like.device, copy=True)

    wanted, own, factories = load_preprocess(wanted)
    dict_utils.merge(common, own)
    asked, _ = utils.extract_sharded_base(wanted)
    dict_utils.merge(common, dict_utils.dict_list_map_outplace(value, asked))
    return mapping.apply_factory_merges(common, factories)


def _all_of_it(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's loading so that it loads everything, and ignores flags that are meant only
    for the job's first start."""

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
