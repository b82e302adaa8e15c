"""Checkpoints of reinforcement learning that `python -m megatron_byteps_rl --store` keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_byteps_rl import store
from megatron_byteps_rl.store import LATEST, Store, StoreError, keep_in_store
from tests.object_store.stores import BUCKET, STORES


def save(folder: Path, step: int) -> None:
    """Write a folder as verl does: the tracker comes last."""
    files = ("data.pt", "actor/dist_ckpt/.metadata", "actor/dist_ckpt/__0_0.distcp")
    for number, name in enumerate(files):
        file = folder / f"global_step_{step}" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes([step, number]) * (1000 + number))
    (folder / LATEST).write_text(str(step))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("kind", STORES)
def test_a_run_begins_with_the_last_checkpoint_of_the_store(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_EVERY_S", 0.01)
    first, second = tmp_path / "first", tmp_path / "second"
    with STORES[kind]() as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        config = tmp_path / "storage.json"
        config.write_text(json.dumps({"profiles": {"jobs": bucket.profile}}))
        monkeypatch.setenv("MSC_CONFIG", str(config))
        # S3 without a profile, too.
        url = {"s3": f"s3://{BUCKET}/run", "gcs": "msc://jobs/run/"}[kind]
        with keep_in_store(first, url):
            save(first, 8)
        with keep_in_store(first, url):
            save(first, 12)
        stored = {name: bucket.read(name) for name in bucket.names()}
        assert stored == {f"run/{name}": data for name, data in contents(first).items()}
        with keep_in_store(second, url):
            wanted = {n: d for n, d in contents(first).items() if "step_8/" not in n}
            assert contents(second) == wanted
            save(second, 16)
        # A later checkpoint in the folder stays.
        save(second, 20)
        with keep_in_store(second, url):
            assert (second / LATEST).read_text() == "20"
        assert bucket.read(f"run/{LATEST}") == b"20"


def test_the_store_names_no_checkpoint_that_it_has_only_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run", 8)
    target = tmp_path / "store"
    monkeypatch.setattr(Store, "_sync", lambda *_: (_ for _ in ()).throw(OSError("cut off")))
    with (
        pytest.raises(StoreError, match=f"the last checkpoint is not in {target}: cut off"),
        keep_in_store(tmp_path / "run", str(target)),
    ):
        pass
    assert not (target / LATEST).exists()


def test_a_store_that_does_not_answer_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    with (
        pytest.raises(StoreError, match="cannot read checkpoints of s3://nowhere/run"),
        keep_in_store(tmp_path, "s3://nowhere/run"),
    ):
        pass
