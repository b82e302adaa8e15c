# A worker: patched Megatron-LM and BytePS on a CUDA base. torch's default build runs on CPUs as well:
# --build-arg CUDA_IMAGE=ubuntu:24.04 or debian:trixie-slim makes one for machines without GPUs. The
# base has Python 3.12 or later. --build-arg WITH=ray, hf or rl
# adds the packages for jobs under Ray, for Hugging Face models and Ray, or for verl. The build context
# is a folder with wheels/ (megatron_byteps), locks/ (bootstrap, base and that of WITH, each
# whole), Megatron-LM/ (patched) and scripts/; scripts/images.sh makes it.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04
# hadolint ignore=DL3006
FROM ${CUDA_IMAGE}

# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        g++ ibverbs-providers iproute2 libibverbs1 librdmacm1 numactl \
        python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN groupadd --gid 10001 byteps \
    && useradd --uid 10001 --gid 10001 --create-home byteps

ENV VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# A separate layer, so that a new version of this project does not download torch again.
ARG WITH=base
COPY locks/ /tmp/locks/
RUN --mount=type=cache,id=uv,target=/root/.cache/uv \
    python3 -m venv "$VIRTUAL_ENV" \
    && python3 -m venv /tmp/uv \
    && /tmp/uv/bin/pip install --no-cache-dir --require-hashes --requirement /tmp/locks/bootstrap.lock \
    && UV_LINK_MODE=copy /tmp/uv/bin/uv pip sync --require-hashes "/tmp/locks/$WITH.lock" \
    && rm -rf /tmp/uv /tmp/locks

COPY wheels/ /tmp/wheels/
COPY Megatron-LM/ /opt/Megatron-LM/
# The folder has a single version.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-index --no-deps --find-links /tmp/wheels megatron-byteps \
    && pip install --no-cache-dir --no-deps --no-build-isolation --editable /opt/Megatron-LM \
    && rm -rf /tmp/wheels \
    && python -c 'import byteps.torch, megatron.core.datasets.helpers_cpp' \
    && if [ "$WITH" != base ]; then python -c "import megatron_byteps_$WITH"; fi
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
