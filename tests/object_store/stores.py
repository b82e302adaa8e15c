"""Servers of object stores in this process, each with an empty bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

import boto3
from gcp_storage_emulator.server import create_server
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from moto.server import ThreadedMotoServer

from tests.object_store.transfers import Transfers

BUCKET = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """An empty one, and how to reach it."""

    profile: dict[str, Any]
    """Of Megatron's storage client."""
    names: Callable[[], list[str]]
    """Of all objects."""
    read: Callable[[str], bytes]


@contextmanager
def s3(transfers: Transfers | None = None) -> Iterator[Bucket]:
    """An S3; `transfers` is told of all parts, and may refuse some."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    if transfers is not None:
        server._server.app = transfers.around(server._server.app)
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        # All servers of a process have the same objects.
        urlopen(Request(f"{url}/moto-api/reset", method="POST")).close()
        where = {"endpoint_url": url, "region_name": "us-east-1"}
        keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
        client = boto3.client("s3", **where, **keys)
        client.create_bucket(Bucket=BUCKET)
        provider = {"type": "s3", "options": {"base_path": BUCKET, **where}}
        options = {"access_key": "any", "secret_key": "any"}
        credentials = {"type": "S3Credentials", "options": options}

        def names() -> list[str]:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
            return [one["Key"] for page in pages for one in page.get("Contents", [])]

        yield Bucket(
            profile={"storage_provider": provider, "credentials_provider": credentials},
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
        options: dict[str, Any] = {"base_path": BUCKET, "project_id": "test", "endpoint_url": url}
        # No credentials: the server asks for none, and Google's would be asked for a token.
        options |= {"skip_signature": True}
        yield Bucket(
            profile={"storage_provider": {"type": "gcs", "options": options}},
            names=lambda: [blob.name for blob in client.list_blobs(BUCKET)],
            read=lambda name: client.bucket(BUCKET).blob(name).download_as_bytes(),
        )


STORES = {"s3": s3, "gcs": gcs}
