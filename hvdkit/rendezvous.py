"""Requests to Horovod's rendezvous server, signed as Horovod's own (runtimes/patches/30-no-stranger.patch).

Standard library only: baselines use it where Horovod is missing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

SECRET = "HOROVOD_RENDEZVOUS_SECRET"  # the key, as 64 hexadecimal digits
_SIGNATURE = "X-Horovod-Signature"
_MOST_BYTES = 2**24  # of an answer


def ask(address: str, port: int, method: str, path: str, body: bytes = b"", timeout_s: float = 60.0) -> bytes | None:
    """What the server answers to the request; None where it has nothing at that path.

    Raises OSError or http.client.HTTPException where no answer comes within `timeout_s` seconds, ValueError where it is
    not the server's that has this job's key.
    """
    import http.client  # which takes 5 ms, and launchers need only SECRET

    head = f"{secrets.token_hex(16)}.1.{hashlib.sha256(body).hexdigest()}"
    signature = f"{head}.{_hmac('request', method, path, len(body), head)}"
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    try:
        connection.request(method, path, body, {_SIGNATURE: signature})
        answer = connection.getresponse()
        said = answer.read(_MOST_BYTES)
    finally:
        connection.close()
    expected = _hmac("response", signature, answer.status, hashlib.sha256(said).hexdigest())
    if not hmac.compare_digest(expected, answer.getheader(_SIGNATURE, "")):
        raise ValueError(f"status {answer.status}: expected an answer that is signed with {SECRET}")
    if answer.status == http.client.NOT_FOUND:
        return None
    if answer.status != http.client.OK:
        raise ValueError(f"status {answer.status}")
    return said


def _hmac(*fields: object) -> str:
    key = bytes.fromhex(os.environ.get(SECRET, ""))
    return hmac.new(key, "\n".join(map(str, fields)).encode(), "sha256").hexdigest()
