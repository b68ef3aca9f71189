"""The elastic driver of the patched Horovod, without ranks: whom it tells of places that come and go, and when."""

import os
import threading
import time
from types import SimpleNamespace

from horovod.runner.elastic import driver as horovods
from horovod.runner.elastic.discovery import FixedHosts

horovods.DISCOVER_HOSTS_FREQUENCY_SECS = 0.05
started, told = [], []


class Places(FixedHosts):
    """Counts how often the driver has asked."""

    asked = 0

    def find_available_hosts_and_slots(self):
        self.asked += 1
        return super().find_available_hosts_and_slots()


places = Places({"a": 1})
driver = horovods.ElasticDriver(SimpleNamespace(init=id, stop=id), places, 1, 2, timeout=60)


def run(slot, _events):
    started.append(slot.local_rank)
    threading.Event().wait()


def wait_for(what):
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def looked(times):
    """Wait until the driver has looked at the places, and told of them, so often."""
    enough = places.asked + times + 1
    wait_for(lambda: places.asked >= enough)


driver.wait_for_available_slots(1)
driver.start(1, run)
places.set({"a": 2})
wait_for(lambda: driver._host_manager.current_hosts.count_available_slots() == 2)
looked(3)
assert not told, "nobody listens yet"
driver._worker_clients["a", 0] = SimpleNamespace(notify_hosts_updated=lambda _, change: told.append(change.name))
wait_for(lambda: len(told) > 2)  # a worker that begins anew forgets what it was told
for now in ("added", "removed"):
    driver.resume()
    looked(1)
    count = len(told)
    looked(3)
    assert len(told) == count, "it has been taken up"
    assert set(told) == {now}, told
    told.clear()
    if now == "added":
        wait_for(lambda: len(started) == 2)
        places.set({"a": 1})
        wait_for(lambda: told)
print("places", sorted(started), flush=True)
os._exit(0)
