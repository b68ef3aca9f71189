#!/bin/sh
# Remove from the Python environment $1 what only builds and tests use. Byte code stays: a user who cannot write it
# would compile it at each start.
set -eu
rm -f "$1"/bin/pip*
cd "$1"/lib/python3*/site-packages
rm -rf pip pip-*.dist-info
find . -type d -name tests -prune -exec rm -rf {} +
# C++ headers and tests, and libclang, which TensorFlow names as a dependency and does not load.
rm -rf clang mxnet/include tensorflow/include torch/include torch/test
if [ -d torch/bin ]; then
    find torch/bin -type f ! -name torch_shm_manager -delete
fi
# The frameworks' own libraries alone: strip breaks some that auditwheel has rewritten (*.libs).
find . -type f \( -name 'libtorch*.so' -o -name 'libtensorflow*.so.*' -o -path './horovod/*.so' \) \
    -exec strip --strip-unneeded {} +
