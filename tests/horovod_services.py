"""One of Horovod's servers, for tests/test_horovod_strangers.py. Runs under a runtime's interpreter.

usage: python horovod_services.py KIND

Prints the port. For each port that it reads from standard input, a client with the secret connects there, and it prints
`ok`, or what went wrong.
"""

import resource
import sys
from typing import Any

from horovod.runner.common.service.driver_service import BasicDriverClient, BasicDriverService
from horovod.runner.common.service.task_service import BasicTaskClient, BasicTaskService
from horovod.runner.common.util import secret
from horovod.runner.elastic import rendezvous, worker
from horovod.runner.http import http_client, http_server

KEY = secret.make_secret_key()


class Driver:
    """In place of the elastic driver."""

    def register_worker_server(self, host: str, slot: int, addresses: Any, key: bytes) -> None:
        assert (host, slot, addresses, key) == ("here", 0, {"lo": []}, KEY)


class Manager:
    """In place of the worker's."""

    def handle_hosts_updated(self, *told: int) -> None:
        assert told == (7, 1)


def honest(kind: str, port: int) -> None:
    """What a client with the secret does."""
    at: dict[str, Any] = {"lo": [("127.0.0.1", port)]}
    if kind == "store":
        http_client.put_data_into_kvstore("127.0.0.1", port, "scope", "key", ["a value"])
        assert http_client.read_data_from_kvstore("127.0.0.1", port, "scope", "key") == ["a value"]
    elif kind in ("rendezvous", "elastic"):
        http_client.put_data_into_kvstore("127.0.0.1", port, "worker_addresses", "here:0", ({"lo": []}, KEY))
    elif kind == "notification":
        worker.WorkerNotificationClient(at, KEY, 0).notify_hosts_updated(7, 1)
    elif kind == "driver":
        BasicDriverClient("driver", at, KEY, 0).register_task(0, at, "hash")
    else:
        BasicTaskClient("task", at, KEY, 0).notify_initial_registration_complete()


def main(kind: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    if kind == "store":
        server = http_server.KVStoreServer(verbose=0)
        port = server.start_server("127.0.0.1")
    elif kind in ("rendezvous", "elastic"):
        handler = (
            http_server.RendezvousHandler if kind == "rendezvous" else rendezvous.create_rendezvous_handler(Driver())
        )
        port = http_server.RendezvousServer(0).start(handler, "127.0.0.1")
    elif kind == "notification":
        service = worker.WorkerNotificationService(KEY, {"lo"}, Manager())
        port = service.get_port()
    elif kind == "driver":
        service = BasicDriverService(1, "driver", KEY, {"lo"})
        port = service.get_port()
    else:
        service = BasicTaskService("task", 0, KEY, {"lo"})
        port = service.get_port()
    print(port, flush=True)
    for line in sys.stdin:
        try:
            honest(kind, int(line))
            print("ok", flush=True)
        except Exception as error:
            print(repr(error), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
