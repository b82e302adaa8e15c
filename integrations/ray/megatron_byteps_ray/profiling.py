"""Profiles chosen steps of chosen ranks, with torch.profiler and BytePS's timeline.

``Profile`` has the values of the flags. It reaches ranks in an environment variable, and
``profiled`` does the work there. Each chosen rank writes a trace of torch.profiler and BytePS's
timeline to the folder, and servers write theirs. ``Profile.merge`` merges all into one file.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import listen

_NS_PER_US = 1000
_FIRST_TORCH_PROCESS = 2_000_001
"""First number of torch's processes in a merged file. BytePS numbers its workers from 1, and its
servers from 1,000,001."""
_RANK = re.compile(r"rank(\d+)")


def merge(files: Sequence[Path]) -> dict[str, Any]:
    """Return a timeline with the events of all files, ``.json`` or ``.json.gz``.

    BytePS writes times since 1970, and torch times since a base that its file has. If there are
    traces of torch, all times are relative to the earliest of these bases, so that a number can
    hold fractions of a microsecond.

    Raises:
        ValueError: a file is not a timeline; the text names it.
    """
    traces = [read(file) for file in files]
    bases = [trace["baseTimeNanoseconds"] for trace in traces if _is_of_torch(trace)]
    origin = min(bases, default=0)
    events: list[Any] = []
    processes = 0
    for number, (file, trace) in enumerate(zip(files, traces, strict=True)):
        if not _is_of_torch(trace):
            events += _shifted(trace["traceEvents"], -origin / _NS_PER_US)
            continue
        shift = (trace["baseTimeNanoseconds"] - origin) / _NS_PER_US
        own = _shifted(trace["traceEvents"], shift)
        name = _name(file, trace, own)
        processes += _set_apart(own, number, _FIRST_TORCH_PROCESS + processes, name)
        events += own
    return {"displayTimeUnit": "ms", "traceEvents": events}


def read(file: Path) -> dict[str, Any]:
    """Read a timeline of BytePS or a trace of torch.profiler, which may be compressed.

    Raises:
        ValueError: the file is neither; the text names it.
    """
    try:
        raw = file.read_bytes()
        text = gzip.decompress(raw) if file.suffix == ".gz" else raw
        trace = json.loads(text)
        if not all(isinstance(event, dict) for event in trace["traceEvents"]):
            raise TypeError("traceEvents are not JSON objects")
    except (ValueError, KeyError, TypeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{file} is no timeline of BytePS or torch: {error!r}") from error
    return trace


def _is_of_torch(trace: dict[str, Any]) -> bool:
    return "baseTimeNanoseconds" in trace


def _name(file: Path, trace: dict[str, Any], events: Sequence[dict[str, Any]]) -> str:
    """Return the name of the process in the viewer."""
    rank = trace.get("distributedInfo", {}).get("rank")
    if rank is not None:
        return f"rank {rank}"
    if in_name := _RANK.search(file.name):
        return f"rank {in_name[1]}"
    pids = [event["pid"] for event in events if isinstance(event.get("pid"), int)]
    return f"process {pids[0]}" if pids else "process"


def _shifted(events: Sequence[dict[str, Any]], shift: float) -> list[dict[str, Any]]:
    if not shift:
        return list(events)
    return [{**event, "ts": event["ts"] + shift} if "ts" in event else event for event in events]


def _set_apart(events: list[dict[str, Any]], file: int, first: int, name: str) -> int:
    """Renumber processes and arrows of a trace so that numbers are unique among files. Name unnamed
    processes. Return the number of processes."""
    numbers: dict[object, int] = {}
    named = set()
    for event in events:
        if "pid" in event:
            event["pid"] = numbers.setdefault(event["pid"], first + len(numbers))
        if "id" in event:
            event["id"] = f"{file}.{event['id']}"
        if event.get("name") == "process_name":
            event["args"] = {"name": f"torch, {name}: {event['args']['name']}"}
            named.add(event["pid"])
    for pid, number in numbers.items():
        if number not in named:
            args = {"name": f"torch, {name}: {pid}"}
            events.append({"ph": "M", "name": "process_name", "pid": number, "args": args})
    return len(numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", nargs="+", type=Path, help="byteps-*.json of BYTEPS_TRACE_DIR, torch's traces"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()
    try:
        text = json.dumps(merge(arguments.files), ensure_ascii=False)
        arguments.output.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())


VARIABLE = "MEGATRON_BYTEPS_PROFILE"
MERGED = "profile.json"
PARTS = "parts"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Steps and ranks to profile. Raises ValueError for invalid values."""

    folder: Path
    """Folder for the result, the same on all machines."""
    ranks: tuple[int, ...] = ()
    """Ranks to profile; empty: all."""
    first: int = 3
    """First profiled step. Steps are counted from 1, from the start of the ranks' processes."""
    last: int = 5

    def __post_init__(self) -> None:
        if not 2 <= self.first <= self.last:
            raise ValueError(
                f"the first step to be profiled must be 2 or more, and the last one no earlier, "
                f"not {self.first} and {self.last}"
            )
        if any(rank < 0 for rank in self.ranks):
            raise ValueError(f"ranks are numbers from 0, not {' '.join(map(str, self.ranks))}")

    @property
    def parts(self) -> Path:
        """Return the folder of the files that processes write."""
        return self.folder.absolute() / PARTS

    def of_ranks(self) -> dict[str, str]:
        """Return the variable for ranks; see ``profiled``."""
        content = {"ranks": self.ranks, "first": self.first, "last": self.last}
        return {VARIABLE: json.dumps({**content, "folder": str(self.folder.absolute())})}

    def of_byteps(self) -> dict[str, str]:
        """Return the variables for BytePS's processes. Rounds are counted from 0."""
        return {
            "BYTEPS_TRACE_ON": "1",
            "BYTEPS_TRACE_DIR": str(self.parts),
            "BYTEPS_TRACE_STEPS": f"{self.first - 1}-{self.last - 1}",
        }

    def clear(self) -> None:
        """Remove the files of an earlier job."""
        for file in [*self.parts.glob("*.json"), self.folder / MERGED]:
            file.unlink(missing_ok=True)

    def merge(self) -> Path:
        """Merge the files of all processes into one, and return its path.

        Raises:
            ValueError: there are no files, or a file cannot be read.
        """
        files = sorted(self.parts.glob("*.json"))
        if not any(file.name.startswith("torch-") for file in files):
            raise ValueError(
                f"no rank has left a profile in {self.parts}: either none is among those chosen, "
                f"or training ended before step {self.first}, or the folder is not shared"
            )
        target = self.folder / MERGED
        target.write_text(json.dumps(merge(files), ensure_ascii=False), encoding="utf-8")
        return target


def asked_for(environment: Mapping[str, str] | None = None) -> Profile | None:
    """Return the profile that the environment asks of this rank; None if it asks for none."""
    values = os.environ if environment is None else environment
    if not values.get(VARIABLE):
        return None
    content = json.loads(values[VARIABLE])
    profile = Profile(
        folder=Path(content["folder"]),
        ranks=tuple(content["ranks"]),
        first=content["first"],
        last=content["last"],
    )
    chosen = not profile.ranks or int(values["RANK"]) in profile.ranks
    return profile if chosen else None


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    """Return a context around a rank's script, in which the steps that the environment asks for are
    profiled.

    A step ends when it is reported (``megatron_byteps_ray.report``; Megatron's loop reports by
    itself).
    """
    profile = asked_for()
    if profile is None:
        yield
        return
    # The variables are set before BytePS starts, because BytePS reads them only once.
    os.environ.update(profile.of_byteps())
    profile.parts.mkdir(parents=True, exist_ok=True)
    recorder = _Recorder(profile, profile.parts / f"torch-rank{os.environ['RANK']}.json")
    listen(recorder.step_done)
    try:
        yield
    finally:
        recorder.stop()  # training may end before the last step


class _Recorder:
    """Starts torch.profiler after one step, and writes its trace after another."""

    def __init__(self, profile: Profile, target: Path) -> None:
        self._profile = profile
        self._target = target
        self._steps = 0
        self._running: Any = None

    def step_done(self) -> None:
        self._steps += 1
        if self._steps == self._profile.first - 1:
            from torch.profiler import profile

            self._running = profile()
            self._running.start()
        elif self._steps == self._profile.last:
            self.stop()

    def stop(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        running.stop()
        # The file is renamed when it is complete, so that readers never see a part of it.
        part = self._target.with_suffix(".part")
        running.export_chrome_trace(str(part))
        part.replace(self._target)
