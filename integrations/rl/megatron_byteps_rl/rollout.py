"""vLLM rollout of verl, changed so that a failed weight update does not block the job for ever.

verl's sender waits for its receiver without a limit, even if the receiver has failed. The sender
here also checks the receiving call. Besides, verl 0.9.1 pauses vLLM by an argument that newer
versions have renamed.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

import ray
import zmq

_LOOK_MS = 500
"""Interval between two checks of the receiving call."""
_LATE_S = 60.0
"""Time limit for the answer when the receiver has returned."""


class WeightUpdateError(RuntimeError):
    """The rollout did not receive the weights."""


def wait_for(socket: Any, event: int, receiving: Any) -> None:
    """Wait until a socket can send to the receiver (zmq.POLLOUT), or has its answer (zmq.POLLIN).

    ``receiving``: Ray's call of the receiver; None if another rank has made it. Raises
    WeightUpdateError if that call has failed, or has returned without an answer.
    """
    returned_at: float | None = None
    while not socket.poll(_LOOK_MS, event):
        if receiving is None or not ray.wait([receiving], timeout=0)[0]:
            continue
        try:
            ray.get(receiving)
        except Exception as error:
            raise WeightUpdateError(
                f"vLLM did not take the weights of training: {error}"
            ) from error
        returned_at = returned_at or time.monotonic()
        if time.monotonic() - returned_at > _LATE_S:
            raise WeightUpdateError(
                "vLLM's call to load the weights returned, but no confirmation of them came"
            )


class _Socket:
    """A socket that waits only while its receiver can still answer."""

    def __init__(self, socket: Any, receiving: Any) -> None:
        self._socket = socket
        self._receiving = receiving

    def send_pyobj(self, message: Any) -> None:
        wait_for(self._socket, zmq.POLLOUT, self._receiving)
        self._socket.send_pyobj(message)

    def recv(self) -> Any:
        wait_for(self._socket, zmq.POLLIN, self._receiving)
        return self._socket.recv()

    def close(self) -> None:
        # unread messages must not block the exit of the process
        self._socket.close(linger=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def _make_adapter() -> type:
    from verl.workers.rollout.vllm_rollout import vllm_rollout

    class Adapter(vllm_rollout.ServerAdapter):
        """verl's client of a vLLM server, which sends weights."""

        async def _execute_method(self, method: str, *args: Any, **kwargs: Any) -> Any:
            made = await super()._execute_method(method, *args, **kwargs)
            if method == "update_weights_from_ipc":
                Sender.receiving = made
            return made

    class Sender(vllm_rollout.BucketedWeightSender):
        receiving: Any = None
        socket: Any

        def _init_socket(self) -> None:
            super()._init_socket()
            self.socket = _Socket(self.socket, self.receiving)

    vllm_rollout.BucketedWeightSender = Sender
    return Adapter


def _make_replica() -> type:
    from verl.experimental.reward_loop import reward_loop
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    # verl starts the workers that ask a reward model after the model's replicas.
    from .rewards import Worker

    reward_loop.RewardLoopWorker = Worker

    class Server(vllm_async_server.vLLMHttpServer):
        """verl's vLLM server."""

        async def launch_server(self, *args: Any, **kwargs: Any) -> None:
            await super().launch_server(*args, **kwargs)
            if engine := getattr(self, "engine", None):
                engine.pause_generation = pause_by_mode(engine.pause_generation)

    class Replica(vllm_async_server.vLLMReplica):
        """A vLLM instance of verl, on all of its nodes."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(Server)

    return Replica


def pause_by_mode(pause: Any) -> Any:
    """Wrap vLLM's `pause_generation` so that it accepts `wait_for_inflight_requests`."""
    if "wait_for_inflight_requests" in inspect.signature(pause).parameters:
        return pause

    async def paused(*, wait_for_inflight_requests: bool = False, **kwargs: Any) -> Any:
        return await pause(mode="wait" if wait_for_inflight_requests else "abort", **kwargs)

    return paused


def __getattr__(name: str) -> Any:
    # The class is made on demand, because verl looks rollouts up by name, and importing vLLM takes
    # seconds.
    if name == "Adapter":
        globals()[name] = _make_adapter()
        return globals()[name]
    raise AttributeError(name)


def register() -> None:
    """Register these as verl's rollout named vllm."""
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    base._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.Adapter"
    RolloutReplicaRegistry.register("vllm", _make_replica)
