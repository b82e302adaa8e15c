"""Servers of object stores in this process, and their behavior with concurrent parts."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from urllib.request import Request, urlopen

import boto3
from gcp_storage_emulator.server import create_server
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from moto.server import ThreadedMotoServer

WAIT_S = 120.0


@dataclass(kw_only=True)
class Transfers:
    """Parts that S3 is receiving, each by its object's name and its number.

    The result does not depend on timing. Once, parts are held until `together` parts of each of
    `objects` objects are in flight, or until the time limit. `met` says which of the two happened.
    """

    together: int = 1
    """Parts of one object."""
    objects: int = 1
    refuses: Callable[[str, int, int], bool] = lambda name, number, attempt: False
    """Decides whether to refuse a part at this attempt, from 1."""
    met: bool = False
    """Whether the number of parts in flight was reached."""
    refused: list[tuple[str, int]] = field(default_factory=list)
    _attempts: Counter[tuple[str, int]] = field(default_factory=Counter)
    _in_flight: Counter[str] = field(default_factory=Counter)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def around(self, application: Any) -> Any:
        """Make a WSGI application that passes all accepted requests to another."""

        def received(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
            query = parse_qs(environ.get("QUERY_STRING", ""))
            if environ["REQUEST_METHOD"] != "PUT" or "partNumber" not in query:
                return application(environ, start)
            name, number = environ["PATH_INFO"], int(query["partNumber"][0])
            with self._part(name, number) as attempt:
                if self.refuses(name, number, attempt):
                    self.refused.append((name, number))
                    environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
                    start("500 Internal Server Error", [("Content-Length", "0")])
                    return []
                # The request has a whole part, which is in flight until the store has it.
                return list(application(environ, start))

        return received

    def _enough(self) -> bool:
        ready = [name for name, count in self._in_flight.items() if count >= self.together]
        self.met = self.met or len(ready) >= self.objects
        return self.met

    @contextmanager
    def _part(self, name: str, number: int) -> Iterator[int]:
        """Count a part as in flight; yields the number of the attempt."""
        with self._changed:
            self._attempts[name, number] += 1
            attempt = self._attempts[name, number]
            self._in_flight[name] += 1
            self._changed.notify_all()
            self._changed.wait_for(self._enough, WAIT_S)
        try:
            yield attempt
        finally:
            with self._changed:
                self._in_flight[name] -= 1


PAGE = Path(__file__).resolve().parents[2] / "docs/use/ray.md"
BUCKET = "my-bucket"
"""Name of the buckets on that page."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """An empty bucket and its access data."""

    profile: dict[str, Any]
    """Profile of Megatron's storage client, as the documentation has it."""
    environment: dict[str, str]
    """Variables with the endpoint and credentials."""
    names: Callable[[], list[str]]
    """Lists the names of all objects."""
    read: Callable[[str], bytes]


def documented(kind: str) -> dict[str, Any]:
    """Return the profile of this type on the page about Ray."""
    (block,) = re.findall(r"^```json\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    profiles = json.loads(block)["profiles"].values()
    (profile,) = [entry for entry in profiles if entry["storage_provider"]["type"] == kind]
    return profile


@contextmanager
def s3(transfers: Transfers | None = None) -> Iterator[Bucket]:
    """Run an S3 server; `transfers` sees all parts, and may refuse some."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    if transfers is not None:
        server._server.app = transfers.around(server._server.app)
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        # All servers of a process share the same objects.
        urlopen(Request(f"{url}/moto-api/reset", method="POST")).close()
        environment = {"AWS_ENDPOINT_URL_S3": url, "AWS_DEFAULT_REGION": "us-east-1"}
        environment |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
        client = boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="any",
            aws_secret_access_key="any",
        )
        client.create_bucket(Bucket=BUCKET)

        def names() -> list[str]:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
            return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

        yield Bucket(
            profile=documented("s3"),
            environment=environment,
            names=names,
            read=lambda name: client.get_object(Bucket=BUCKET, Key=name)["Body"].read(),
        )
    finally:
        server.stop()


@contextmanager
def gcs() -> Iterator[Bucket]:
    with create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET) as server:
        url = f"http://127.0.0.1:{server._api._httpd.server_port}"
        client = storage.Client(
            project="test",
            credentials=AnonymousCredentials(),
            client_options={"api_endpoint": url},
        )
        # Google's client then asks for no token.
        yield Bucket(
            profile=documented("gcs"),
            environment={"STORAGE_EMULATOR_HOST": url},
            names=lambda: [blob.name for blob in client.list_blobs(BUCKET)],
            read=lambda name: client.bucket(BUCKET).blob(name).download_as_bytes(),
        )


STORES = {"s3": s3, "gcs": gcs}
