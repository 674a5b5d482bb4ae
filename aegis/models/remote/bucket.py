"""Checkpoints in a bucket of S3 or of what speaks its protocol (`AWS_ENDPOINT_URL`): boto3 lists and signs, the files
come over HTTP as any others. It is the extra `s3`."""

from __future__ import annotations

import asyncio
import base64
from contextlib import closing
from functools import partial
from typing import Any

import httpx
from msgspec.structs import replace

from aegis.core.errors import ModelRefused, install_advice
from aegis.models.remote.address import BucketAddress
from aegis.models.remote.http import LIST_BYTES_MAX, Away, why
from aegis.models.remote.listing import FILES_MAX, SUMS, Listing, RemoteFile, beside_weights, read_sums

_CHUNK_BYTES = 1 << 20
_SIGNED_S = 3600


class Bucket:
    """The objects under one prefix. Each request is signed when it is made, so that a long fetch outlives a signature.
    Raises ModelRefused without boto3."""

    def __init__(self, address: BucketAddress) -> None:
        try:
            import boto3
            from botocore import UNSIGNED
            from botocore.config import Config
        except ImportError:
            raise ModelRefused(f"s3:// needs boto3; {install_advice('s3')}") from None
        session = boto3.session.Session()
        signs = session.get_credentials() is not None
        how: dict[str, Any] = {"retries": {"mode": "standard", "max_attempts": 4}, "connect_timeout": 10}
        how |= {"s3": {"addressing_style": "path" if "." in address.bucket else "auto"}}
        how |= {} if signs else {"signature_version": UNSIGNED}
        region = session.region_name or "us-east-1"
        self._client = session.client("s3", region_name=region, config=Config(**how))
        self._bucket = address.bucket
        self._prefix = address.prefix and address.prefix + "/"
        self._file = address.file

    async def listing(self, client: httpx.AsyncClient) -> Listing:
        """Raises ModelRefused."""
        found = Listing(tuple(await self._ask(self._objects)))
        sums: dict[str, str] = {}
        if found.named(SUMS):
            sums = read_sums((await self._ask(self._sums)).decode("utf-8", "replace"))
        needed = {self._file} if self._file else {file.name for file in beside_weights(found)}
        files = []
        for file in found.files:
            if file.name in needed or (file.name.endswith(".safetensors") and not self._file):
                files.append(await self._headed(file, sums.get(file.name)))
            else:
                files.append(file)
        return Listing(tuple(files))

    async def locate(self, file: RemoteFile) -> tuple[str, dict[str, str]]:
        where = {"Bucket": self._bucket, "Key": self._prefix + file.name}
        url = await asyncio.to_thread(
            self._client.generate_presigned_url, "get_object", Params=where, ExpiresIn=_SIGNED_S
        )
        return url, file.headers

    def _objects(self) -> list[RemoteFile]:
        files: list[RemoteFile] = []
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix):
            for each in page.get("Contents", ()):
                if name := each["Key"].removeprefix(self._prefix):
                    files.append(RemoteFile(name, "", each["Size"], tag=each["ETag"]))
            if len(files) > FILES_MAX:
                raise ModelRefused(f"it has more than {FILES_MAX} files")
        if not files:
            raise ModelRefused(f"there is nothing under {self._prefix or '/'} in the bucket {self._bucket}")
        return files

    def _sums(self) -> bytes:
        body, found = self._client.get_object(Bucket=self._bucket, Key=self._prefix + SUMS)["Body"], bytearray()
        with closing(body):
            for chunk in body.iter_chunks(_CHUNK_BYTES):
                found += chunk
                if len(found) > LIST_BYTES_MAX:
                    raise ModelRefused(
                        f"{SUMS} has more than {LIST_BYTES_MAX >> 20} MiB, which are the most that are read"
                    )
        return bytes(found)

    async def _headed(self, file: RemoteFile, sha256: str | None) -> RemoteFile:
        """With its sha256, if the bucket has that of the whole object: one of parts says nothing of the content."""
        asked = partial(self._client.head_object, Bucket=self._bucket, Key=self._prefix + file.name)
        head = await self._ask(partial(asked, ChecksumMode="ENABLED"))
        own = head.get("ChecksumSHA256", "")
        if own and "-" not in own:
            sha256 = base64.b64decode(own).hex()
        headers = {"If-Match": head["ETag"]}
        return replace(file, size_bytes=head["ContentLength"], sha256=sha256, tag=head["ETag"], headers=headers)

    async def _ask(self, call: Any) -> Any:
        """Raises ModelRefused."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return await asyncio.to_thread(call)
        except ClientError as error:
            told = error.response.get("Error", {})
            code = told.get("Code")
            if code in ("403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
                hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of who may read it"
                raise ModelRefused(f"the bucket {self._bucket} answers {code}: {hint}") from None
            raise ModelRefused(f"the bucket {self._bucket} answers {code}: {told.get('Message')}") from None
        except BotoCoreError as error:
            raise Away(f"the bucket {self._bucket} cannot be reached ({why(error)}); try again later") from None
