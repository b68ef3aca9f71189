# Images of hvdkit: a target for each framework (pytorch; tensorflow, with Keras; mxnet) and one for the command line.
#
#   docker build --target pytorch --tag hvdkit:pytorch .
#   docker build --target pytorch --tag hvdkit:pytorch-gpu --build-arg DEVICE=gpu .
#
# BuildKit builds the stages that the target needs. The classic builder builds all stages above the target too.
# `make image-check` builds every CPU target and trains in each.

# cpu or gpu; nothing means cpu.
ARG DEVICE

# CPU: Debian 12, whose Python is 3.11. Its packages are pinned by the release: it gets security updates alone.
ARG DEBIAN=debian:12.14-slim

# GPU: NVIDIA's images, which bring CUDA's compiler and a libnccl-dev of their own (devel), or the libraries (runtime).
# torch 2.13 brings CUDA 13.0, and Ubuntu 24.04 has Python 3.12. The other frameworks need other versions:
#   tensorflow  --build-arg CUDA=12.9.1
#   mxnet       --build-arg CUDA=11.7.1-cudnn8 --build-arg UBUNTU=22.04 --build-arg PYTHON=python3.11
ARG CUDA=13.0.3
ARG UBUNTU=24.04
# Empty without DEVICE: the classic builder asks for every base, also for one that the target does not use.
ARG GPU_DEVEL=${DEVICE:+nvidia/cuda:${CUDA}-devel-ubuntu${UBUNTU}}
ARG GPU_RUNTIME=${DEVICE:+nvidia/cuda:${CUDA}-runtime-ubuntu${UBUNTU}}

FROM ${DEBIAN} AS cpu-devel
FROM ${DEBIAN} AS cpu-runtime
FROM ${GPU_DEVEL:-${DEBIAN}} AS gpu-devel
FROM ${GPU_RUNTIME:-${DEBIAN}} AS gpu-runtime


# What compiles: hvdkit in an environment, and what `hvdkit runtime build` needs.
FROM ${DEVICE:-cpu}-devel AS build
ARG PYTHON=python3
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# Else Horovod is compiled for the processor that builds the image. These are its own choice on any x86 since 2013;
# give `--build-arg HOROVOD_BUILD_ARCH_FLAGS=` others where needed.
ARG HOROVOD_BUILD_ARCH_FLAGS="-mavx -mf16c -mfma"
ENV HOROVOD_BUILD_ARCH_FLAGS=${HOROVOD_BUILD_ARCH_FLAGS}
ENV HVDKIT_RUNTIMES=/usr/local/lib/hvdkit/runtimes
ENV PATH=/usr/local/lib/hvdkit/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates g++ libopenmpi-dev make openmpi-bin ${PYTHON} ${PYTHON}-dev ${PYTHON}-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /usr/local/src/hvdkit
COPY setup.py setup.cfg pyproject.toml README.md LICENSE ./
COPY docker/constraints.txt docker/slim.sh docker/
COPY hvdkit hvdkit
COPY recipes recipes
# The constraint in pip's environment binds the isolated build of the wheel as well.
RUN ${PYTHON} -m venv /usr/local/lib/hvdkit \
    && PIP_CONSTRAINT=/usr/local/src/hvdkit/docker/constraints.txt \
        pip wheel --no-cache-dir --no-deps --wheel-dir /tmp/wheels . \
    && pip install --no-cache-dir --constraint docker/constraints.txt /tmp/wheels/hvdkit-*.whl

FROM build AS slim
RUN docker/slim.sh /usr/local/lib/hvdkit


# The command line alone: predictions, reports, recipes.
FROM ${DEVICE:-cpu}-runtime AS driver
ARG PYTHON=python3
ENV PATH=/usr/local/lib/hvdkit/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends ${PYTHON} \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/* \
    && useradd --create-home --uid 10001 --password '*' --shell /bin/bash hvdkit
# An environment holds absolute paths, so it lies where it was made.
COPY --from=slim /usr/local/lib/hvdkit /usr/local/lib/hvdkit
USER hvdkit
WORKDIR /home/hvdkit
RUN hvdkit recipes list
CMD ["hvdkit", "--help"]


# A node of a cluster, without a framework: Open MPI, ssh, and the libraries that MXNet needs of the system.
FROM driver AS node
ENV HVDKIT_RUNTIMES=/usr/local/lib/hvdkit/runtimes
USER root
# No private key stays in the image: node.sh makes sshd's and the user's when a node starts.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        libgomp1 libquadmath0 openmpi-bin openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/* /etc/ssh/ssh_host_* \
    && install --directory --owner hvdkit --group hvdkit --mode 700 /home/hvdkit/.ssh /home/hvdkit/runs
COPY docker/ssh_config /etc/ssh/ssh_config.d/hvdkit.conf
COPY docker/sshd_config docker/node.sh /usr/local/share/hvdkit/
USER hvdkit
CMD ["hvdkit", "doctor"]


FROM build AS pytorch-build
ARG DEVICE
RUN hvdkit runtime build pytorch --${DEVICE:-cpu} && docker/slim.sh $HVDKIT_RUNTIMES/pytorch

FROM node AS pytorch
COPY --from=pytorch-build /usr/local/lib/hvdkit/runtimes /usr/local/lib/hvdkit/runtimes
RUN hvdkit doctor


FROM build AS tensorflow-build
ARG DEVICE
RUN [ "$DEVICE" != gpu ] || /usr/local/cuda/bin/nvcc --version | grep -q 'release 12' \
    || { echo 'TensorFlow needs CUDA 12: --build-arg CUDA=12.9.1' >&2; exit 2; }
RUN hvdkit runtime build tensorflow --${DEVICE:-cpu} && docker/slim.sh $HVDKIT_RUNTIMES/tensorflow

# With Keras.
FROM node AS tensorflow
COPY --from=tensorflow-build /usr/local/lib/hvdkit/runtimes /usr/local/lib/hvdkit/runtimes
RUN hvdkit doctor


FROM build AS mxnet-build
ARG DEVICE
# MXNet for CUDA loads the driver's library, which is on a machine with a GPU only; CUDA has a stand-in for building.
RUN [ "$DEVICE" != gpu ] || ln -s /usr/local/cuda/lib64/stubs/libcuda.so /usr/lib/x86_64-linux-gnu/libcuda.so.1
RUN hvdkit runtime build mxnet --${DEVICE:-cpu} && docker/slim.sh $HVDKIT_RUNTIMES/mxnet

FROM node AS mxnet
ARG DEVICE
COPY --from=mxnet-build /usr/local/lib/hvdkit/runtimes /usr/local/lib/hvdkit/runtimes
# For CUDA it needs the driver, as above, which is there when the image runs.
RUN [ "$DEVICE" = gpu ] || hvdkit doctor
