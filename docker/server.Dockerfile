# Image of scheduler and servers: byteps-server and its libraries, for linux/amd64 and linux/arm64. Nothing is compiled
# here: the build context is a folder with linux/amd64/ and linux/arm64/, each an unpacked byteps-server archive. `make
# images` makes the context and the images.
ARG DEBIAN_IMAGE=debian:bookworm-slim
# hadolint ignore=DL3006
FROM ${DEBIAN_IMAGE}

# Libraries for RDMA and encryption, loaded when a job needs them. The archive's snapshot decides their versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ibverbs-providers libibverbs1 librdmacm1 libssl3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log

# A numeric user, because Kubernetes checks runAsNonRoot against it.
RUN groupadd --gid 10001 byteps \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin byteps \
    && install -d -o 10001 -g 10001 /run/byteps

ARG TARGETPLATFORM
COPY ${TARGETPLATFORM}/ /opt/byteps/

ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="byteps-server" \
      org.opencontainers.image.description="Scheduler and parameter servers of Megatron-BytePS" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

ENV PATH=/opt/byteps/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    BYTEPS_HEALTH_SOCKET=/run/byteps/health.sock
USER 10001:10001
# The process itself answers: a hanging server is unhealthy, a server that waits for its job is not.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s --retries=3 \
    CMD ["byteps-server", "--health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["byteps-server"]
