"""One rank: reduce within process sets that span both hosts: by local rank, and one rank of h1 with both of h2."""

import horovod.mxnet as hvd
import mxnet as mx

across = [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])]
uneven = hvd.ProcessSet([1, 2, 3])
hvd.init(process_sets=[*across, uneven])
assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (4, 2, 2)
mine = across[hvd.local_rank()]
value = mx.nd.ones(5) * 10 ** hvd.rank()
total = hvd.allreduce(value, op=hvd.Sum, name=f"across.{hvd.local_rank()}", process_set=mine)
expected = 101 if hvd.local_rank() == 0 else 1010
assert (total.asnumpy() == expected).all(), total
if uneven.included():
    total = hvd.allreduce(value, op=hvd.Sum, name="uneven", process_set=uneven)
    assert (total.asnumpy() == 1110).all(), total
everyone = hvd.allreduce(value, op=hvd.Sum, name="all")
assert (everyone.asnumpy() == 1111).all(), everyone
print(f"rank {hvd.rank()}: sums are right", flush=True)
hvd.shutdown()
