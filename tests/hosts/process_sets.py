"""One rank: reduce within process sets that span both hosts, by local rank."""

import horovod.mxnet as hvd
import mxnet as mx

across = [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])]
hvd.init(process_sets=across)
assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (4, 2, 2)
mine = across[hvd.local_rank()]
value = mx.nd.ones(5) * 10 ** hvd.rank()
total = hvd.allreduce(value, op=hvd.Sum, name=f"across.{hvd.local_rank()}", process_set=mine)
expected = 101 if hvd.local_rank() == 0 else 1010
assert (total.asnumpy() == expected).all(), total
everyone = hvd.allreduce(value, op=hvd.Sum, name="all")
assert (everyone.asnumpy() == 1111).all(), everyone
print(f"rank {hvd.rank()}: sums are right", flush=True)
hvd.shutdown()
