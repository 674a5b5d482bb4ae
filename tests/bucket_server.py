"""A server that speaks the protocol of S3, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

_KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hidden-word", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "models"


@dataclass(frozen=True, slots=True)
class BucketServer:
    """`environment` is what its clients are told by; `client` writes to its bucket."""

    environment: dict[str, str]
    client: Any

    def put(self, key: str, content: bytes, *, digest: bool = True) -> None:
        checksum = {"ChecksumAlgorithm": "SHA256"} if digest else {}
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content, **checksum)


@contextmanager
def bucket() -> Iterator[BucketServer]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=_KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=_KEYS["AWS_SECRET_ACCESS_KEY"],
            region_name=_KEYS["AWS_DEFAULT_REGION"],
        )
        client.create_bucket(Bucket=BUCKET)
        yield BucketServer(_KEYS | {"AWS_ENDPOINT_URL": endpoint}, client)
    finally:
        server.stop()
