"""The second port of the Hub of the tests: what a CDN serves and a bucket takes, by signed addresses, no tokens."""

from __future__ import annotations

import hashlib
import hmac
import time
from urllib.parse import parse_qs, urlencode

from hub_call import TYPES, Call, Reply, Route, file_reply


def signed(call: Call, where: str, **facts: str) -> str:
    facts["expires"] = str(time.time() + call.hub.url_lifetime)
    query = urlencode(facts)
    return f"{call.hub.cdn_url}/{where}?{query}&signature={_signature(call, where, query)}"


def _signature(call: Call, where: str, query: str) -> str:
    return hmac.new(call.hub.secret, f"{where}?{query}".encode(), "sha256").hexdigest()


def find(call: Call) -> tuple[str, Route]:
    match [call.method, *call.segments]:
        case ["GET" | "HEAD", "cdn", plural, space, name, _]:
            call.repo_type, call.repo_id = TYPES[plural], f"{space}/{name}"
            call.path, call.revision = call.text("path"), call.text("commit")
            return "cdn", guarded(cdn_file)
        case ["PUT", "upload", plural, space, name, sha256]:
            call.repo_type, call.repo_id = TYPES[plural], f"{space}/{name}"
            call.path = sha256
            return "lfs-upload", guarded(put_object)
        case ["PUT", "upload", plural, space, name, sha256, _]:
            call.repo_type, call.repo_id = TYPES[plural], f"{space}/{name}"
            call.path = sha256
            return "lfs-part", guarded(put_part)
        case _:
            return "unknown", lambda _: bucket_error(403, "AccessDenied", "Access Denied")


def guarded(route: Route) -> Route:
    """A bucket refuses two ways of saying who one is, and addresses that are forged or too old."""

    def check(call: Call) -> Reply:
        if "authorization" in call.headers:
            call.hub.leaks.append(call.request)
            return bucket_error(400, "InvalidArgument", "Only one auth mechanism allowed")
        query, _, signature = call.raw_query.rpartition("&signature=")
        if signature != _signature(call, "/".join(call.segments), query):
            return bucket_error(403, "SignatureDoesNotMatch", "The request signature does not match")
        if float(parse_qs(query)["expires"][0]) < time.time():
            return bucket_error(403, "AccessDenied", "Request has expired")
        return route(call)

    return check


def bucket_error(status: int, code: str, message: str) -> Reply:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
    return Reply(status, text.encode(), {"Content-Type": "application/xml"})


def cdn_file(call: Call) -> Reply:
    sha256 = call.segments[-1]
    path = call.hub.store.path(sha256)
    if not path.exists():
        return bucket_error(404, "NoSuchKey", "The specified key does not exist.")
    headers = {"Content-Type": "application/octet-stream", "Cache-Control": "public, max-age=31536000"}
    headers["Content-Disposition"] = f'inline; filename="{call.path.rsplit("/", 1)[-1]}";'
    return file_reply(call, path, path.stat().st_size, sha256, headers)


def put_object(call: Call) -> Reply:
    oid = call.segments[-1]
    with call.hub.store.scratch() as scratch:
        digest = hashlib.sha256()
        with scratch.open("wb") as file:
            for chunk in call.incoming:
                file.write(chunk)
                digest.update(chunk)
        size = scratch.stat().st_size
        if digest.hexdigest() != oid or size != int(call.text("size")):
            return bucket_error(400, "BadDigest", "The digest you specified did not match what we received")
        call.hub.store.adopt(scratch, oid)
    with call.hub.lock:
        call.hub.repos[call.repo_type, call.repo_id].lfs[oid] = size
    return Reply(200, b"", {"ETag": f'"{oid[:32]}"'})


def put_part(call: Call) -> Reply:
    data = call.incoming.read()
    sha256, _ = call.hub.store.put(data)
    etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
    with call.hub.lock:
        call.hub.uploads[call.text("upload_id")][int(call.segments[-1])] = (etag, sha256)
    return Reply(200, b"", {"ETag": f'"{etag}"'})
