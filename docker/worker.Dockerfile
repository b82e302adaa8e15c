# A worker: patched Megatron-LM and BytePS on a CUDA base. torch's default build runs on CPUs as well,
# so that --build-arg CUDA_IMAGE=ubuntu:24.04 makes one for machines without GPUs. The build context
# is a folder with wheels/ (byteps), Megatron-LM/ (patched), scripts/ and requirements.lock;
# `make images` makes it.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04
# hadolint ignore=DL3006
FROM ${CUDA_IMAGE}

# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        g++ ibverbs-providers libibverbs1 librdmacm1 numactl \
        python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN groupadd --gid 10001 byteps \
    && useradd --uid 10001 --gid 10001 --create-home byteps

ENV VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# Its own layer: a new version of ours does not load torch anew.
COPY requirements.lock /tmp/requirements.lock
RUN python3 -m venv "$VIRTUAL_ENV" \
    && pip install --no-cache-dir --require-hashes --requirement /tmp/requirements.lock \
    && rm /tmp/requirements.lock

COPY wheels/ /tmp/wheels/
COPY Megatron-LM/ /opt/Megatron-LM/
RUN pip install --no-cache-dir --no-deps /tmp/wheels/*.whl \
    && pip install --no-cache-dir --no-deps --no-build-isolation --editable /opt/Megatron-LM \
    && rm -rf /tmp/wheels \
    && python -c 'import byteps.torch, megatron.core.datasets.helpers_cpp'
COPY scripts/ /opt/byteps/scripts/

ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="megatron-byteps-worker" \
      org.opencontainers.image.description="Megatron-LM with gradients summed by BytePS" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

USER 10001:10001
WORKDIR /home/byteps
ENTRYPOINT ["/opt/byteps/scripts/worker.sh"]
CMD ["--help"]
