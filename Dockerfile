# Images of hvdkit: a target for each framework (pytorch; tensorflow, with Keras; mxnet) and one for the command line.
#
#   docker build --target pytorch --tag hvdkit:pytorch .
#   docker build --target pytorch --tag hvdkit:pytorch-gpu --build-arg DEVICE=gpu .
#
# Every step of the CPU targets is run in a fresh Debian 12 by `make image-check`. The GPU bases are read from their
# published names and from the frameworks' own requirements; nobody has built them yet.

ARG DEVICE=cpu

# CPU: Debian 12, whose Python is 3.11. Its packages are pinned by the release: it gets security updates alone.
ARG DEBIAN=debian:12.14-slim

# GPU: NVIDIA's images, which bring CUDA's compiler and a libnccl-dev of their own (devel), or the libraries (runtime).
# torch 2.13 brings CUDA 13.0 and TensorFlow 2.21 any CUDA 12 from 12.5 on. Ubuntu 24.04 has Python 3.12, which
# both have wheels for. MXNet's last CUDA wheel is for 11.7 with cuDNN 8 and ends at Python 3.11, which Ubuntu 22.04 has
# in `universe` beside its 3.10.
ARG PYTORCH_CUDA=13.0.3
ARG TENSORFLOW_CUDA=12.9.1
ARG MXNET_CUDA=11.7.1-cudnn8

FROM ${DEBIAN} AS pytorch-cpu-devel
FROM ${DEBIAN} AS pytorch-cpu-runtime
FROM nvidia/cuda:${PYTORCH_CUDA}-devel-ubuntu24.04 AS pytorch-gpu-devel
FROM nvidia/cuda:${PYTORCH_CUDA}-runtime-ubuntu24.04 AS pytorch-gpu-runtime

FROM ${DEBIAN} AS tensorflow-cpu-devel
FROM ${DEBIAN} AS tensorflow-cpu-runtime
FROM nvidia/cuda:${TENSORFLOW_CUDA}-devel-ubuntu24.04 AS tensorflow-gpu-devel
FROM nvidia/cuda:${TENSORFLOW_CUDA}-runtime-ubuntu24.04 AS tensorflow-gpu-runtime

FROM ${DEBIAN} AS mxnet-cpu-devel
FROM ${DEBIAN} AS mxnet-cpu-runtime
FROM nvidia/cuda:${MXNET_CUDA}-devel-ubuntu22.04 AS mxnet-gpu-devel
FROM nvidia/cuda:${MXNET_CUDA}-runtime-ubuntu22.04 AS mxnet-gpu-runtime


# hvdkit's wheel, the same for all.
FROM ${DEBIAN} AS package
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /usr/local/src/hvdkit
COPY setup.py setup.cfg pyproject.toml README.md LICENSE ./
COPY docker/constraints.txt docker/
COPY hvdkit hvdkit
COPY recipes recipes
# The constraint in pip's environment binds the isolated build as well.
RUN python3 -m venv /tmp/build \
    && PIP_CONSTRAINT=/usr/local/src/hvdkit/docker/constraints.txt /tmp/build/bin/pip wheel --no-deps --wheel-dir /wheels . \
    && cp docker/constraints.txt /wheels/


# The command line alone: predictions, reports, recipes.
FROM ${DEBIAN} AS driver-build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=package /wheels /wheels
RUN python3 -m venv /usr/local/lib/hvdkit \
    && /usr/local/lib/hvdkit/bin/pip install --constraint /wheels/constraints.txt /wheels/hvdkit-*.whl

FROM ${DEBIAN} AS driver
ENV PATH=/usr/local/lib/hvdkit/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 --password '*' --shell /bin/bash hvdkit
# An environment holds absolute paths, so it lies where it was made.
COPY --from=driver-build /usr/local/lib/hvdkit /usr/local/lib/hvdkit
USER hvdkit
WORKDIR /home/hvdkit
RUN hvdkit recipes list
CMD ["hvdkit", "--help"]


# PyTorch.
FROM pytorch-${DEVICE}-devel AS pytorch-build
ARG DEVICE
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# Else Horovod is compiled for the processor that builds the image. These are its own choice on any x86 since 2013;
# give `--build-arg HOROVOD_BUILD_ARCH_FLAGS=` others where needed.
ARG HOROVOD_BUILD_ARCH_FLAGS="-mavx -mf16c -mfma"
ENV HVDKIT_RUNTIMES=/usr/local/lib/hvdkit/runtimes
ENV PATH=/usr/local/lib/hvdkit/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates g++ libopenmpi-dev make openmpi-bin python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=package /wheels /wheels
RUN python3 -m venv /usr/local/lib/hvdkit \
    && /usr/local/lib/hvdkit/bin/pip install --constraint /wheels/constraints.txt /wheels/hvdkit-*.whl
RUN hvdkit runtime build pytorch --${DEVICE}

FROM pytorch-${DEVICE}-runtime AS pytorch
ENV HVDKIT_RUNTIMES=/usr/local/lib/hvdkit/runtimes
ENV PATH=/usr/local/lib/hvdkit/bin:$PATH
# No private key stays in the image: node.sh makes sshd's and the user's when a node starts.
RUN apt-get update \
    && apt-get install -y --no-install-recommends openmpi-bin openssh-client openssh-server python3 \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --create-home --uid 10001 --password '*' --shell /bin/bash hvdkit \
    && install --directory --owner hvdkit --group hvdkit --mode 700 /home/hvdkit/.ssh /home/hvdkit/runs
COPY --from=pytorch-build /usr/local/lib/hvdkit /usr/local/lib/hvdkit
COPY docker/ssh_config /etc/ssh/ssh_config.d/hvdkit.conf
COPY docker/sshd_config docker/node.sh /usr/local/share/hvdkit/
USER hvdkit
WORKDIR /home/hvdkit
RUN hvdkit doctor
CMD ["hvdkit", "doctor"]


# TensorFlow, and Keras on it.
FROM tensorflow-${DEVICE}-devel AS tensorflow-build
ARG DEVICE
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG HOROVOD_BUILD_ARCH_FLAGS="-mavx -mf16c -mfma"
ENV HVDKIT_RUNTIMES=/usr/local/lib/hvdkit/runtimes
ENV PATH=/usr/local/lib/hvdkit/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates g++ libopenmpi-dev make openmpi-bin python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=package /wheels /wheels
RUN python3 -m venv /usr/local/lib/hvdkit \
    && /usr/local/lib/hvdkit/bin/pip install --constraint /wheels/constraints.txt /wheels/hvdkit-*.whl
RUN hvdkit runtime build tensorflow --${DEVICE}

FROM tensorflow-${DEVICE}-runtime AS tensorflow
ENV HVDKIT_RUNTIMES=/usr/local/lib/hvdkit/runtimes
ENV PATH=/usr/local/lib/hvdkit/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends openmpi-bin openssh-client openssh-server python3 \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --create-home --uid 10001 --password '*' --shell /bin/bash hvdkit \
    && install --directory --owner hvdkit --group hvdkit --mode 700 /home/hvdkit/.ssh /home/hvdkit/runs
COPY --from=tensorflow-build /usr/local/lib/hvdkit /usr/local/lib/hvdkit
COPY docker/ssh_config /etc/ssh/ssh_config.d/hvdkit.conf
COPY docker/sshd_config docker/node.sh /usr/local/share/hvdkit/
USER hvdkit
WORKDIR /home/hvdkit
RUN hvdkit doctor
CMD ["hvdkit", "doctor"]


# MXNet.
FROM mxnet-${DEVICE}-devel AS mxnet-build
ARG DEVICE
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG HOROVOD_BUILD_ARCH_FLAGS="-mavx -mf16c -mfma"
ENV HVDKIT_RUNTIMES=/usr/local/lib/hvdkit/runtimes
ENV PATH=/usr/local/lib/hvdkit/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates g++ libopenmpi-dev make openmpi-bin python3.11 python3.11-dev python3.11-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=package /wheels /wheels
RUN python3.11 -m venv /usr/local/lib/hvdkit \
    && /usr/local/lib/hvdkit/bin/pip install --constraint /wheels/constraints.txt /wheels/hvdkit-*.whl
# MXNet for CUDA loads the driver's library, which is on a machine with a GPU only; CUDA has a stand-in for building.
RUN [ "$DEVICE" = cpu ] || ln -s /usr/local/cuda/lib64/stubs/libcuda.so /usr/lib/x86_64-linux-gnu/libcuda.so.1
RUN hvdkit runtime build mxnet --${DEVICE}

FROM mxnet-${DEVICE}-runtime AS mxnet
ARG DEVICE
ENV HVDKIT_RUNTIMES=/usr/local/lib/hvdkit/runtimes
ENV PATH=/usr/local/lib/hvdkit/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 libquadmath0 openmpi-bin openssh-client openssh-server python3.11 \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --create-home --uid 10001 --password '*' --shell /bin/bash hvdkit \
    && install --directory --owner hvdkit --group hvdkit --mode 700 /home/hvdkit/.ssh /home/hvdkit/runs
COPY --from=mxnet-build /usr/local/lib/hvdkit /usr/local/lib/hvdkit
COPY docker/ssh_config /etc/ssh/ssh_config.d/hvdkit.conf
COPY docker/sshd_config docker/node.sh /usr/local/share/hvdkit/
USER hvdkit
WORKDIR /home/hvdkit
# For CUDA it needs the driver, as above, which is there when the image runs.
RUN [ "$DEVICE" = gpu ] || hvdkit doctor
CMD ["hvdkit", "doctor"]
