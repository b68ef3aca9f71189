"""Horovod's elastic driver under `hvdkit launch`, without ranks: whom it tells of places that come and go, and when."""

import os
import threading
import time
from types import SimpleNamespace

from horovod.runner.elastic import driver as horovods
from horovod.runner.elastic.discovery import FixedHosts

from hvdkit.launch.launchers.horovodrun_program import _Insists

horovods.DISCOVER_HOSTS_FREQUENCY_SECS = 0.05
started, told = [], []
places = FixedHosts({"a": 1})
driver = _Insists(SimpleNamespace(init=id, stop=id), places, 1, 2, timeout=60)


def run(slot, _events):
    started.append(slot.local_rank)
    threading.Event().wait()


def wait_for(what):
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


driver.wait_for_available_slots(1)
driver.start(1, run)
places.set({"a": 2})
wait_for(lambda: driver._host_manager.current_hosts.count_available_slots() == 2)
time.sleep(0.2)
assert not told, "nobody listens yet"
driver._worker_clients["a", 0] = SimpleNamespace(notify_hosts_updated=lambda _, change: told.append(change.name))
wait_for(lambda: len(told) > 2)  # a worker that begins anew forgets what it was told
for now in ("added", "removed"):
    driver.resume()
    wait_for(lambda: not driver._untold)
    count = len(told)
    time.sleep(0.3)
    assert len(told) == count, "it has been taken up"
    assert set(told) == {now}, told
    told.clear()
    if now == "added":
        wait_for(lambda: len(started) == 2)
        places.set({"a": 1})
        wait_for(lambda: told)
print("places", sorted(started), flush=True)
os._exit(0)
