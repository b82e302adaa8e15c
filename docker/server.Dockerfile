# The scheduler and the servers, for linux/amd64 and linux/arm64. In the repository's root:
#   docker build -f docker/server.Dockerfile .
# The first stage runs on the machine that builds, and cross-compiles where another platform is asked for. It takes the
# patched BytePS from build/byteps where `make setup` has made that, or else makes it, with upstream's source
# distribution from a package index.
ARG DEBIAN_IMAGE=debian:bookworm-slim
ARG BUILD_IMAGE=${DEBIAN_IMAGE}
# hadolint ignore=DL3006
FROM --platform=$BUILDPLATFORM ${BUILD_IMAGE} AS build

# Without BuildKit nobody sets it.
ARG TARGETPLATFORM
# hadolint ignore=DL3008
RUN target="${TARGETPLATFORM#linux/}" \
    && native="$(dpkg --print-architecture)" \
    && target="${target:-$native}" \
    && case "$target" in \
        amd64) triplet=x86_64-linux-gnu; compiler=g++-x86-64-linux-gnu ;; \
        arm64) triplet=aarch64-linux-gnu; compiler=g++-aarch64-linux-gnu ;; \
        *) echo "the platform is '$TARGETPLATFORM', not linux/amd64 or linux/arm64" >&2; exit 2 ;; \
    esac \
    && if [ "$target" = "$native" ]; then compiler=g++; else dpkg --add-architecture "$target"; fi \
    && apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates cmake git ninja-build python3 python3-pip "$compiler" \
        "libibverbs-dev:$target" "librdmacm-dev:$target" "libsodium-dev:$target" \
    && echo "$triplet" >/triplet

WORKDIR /src
COPY . .
RUN python3 -B -m scripts.patchset apply --only byteps
RUN triplet="$(cat /triplet)" \
    && cmake -G Ninja -S build/byteps -B /build \
        -DCMAKE_SYSTEM_NAME=Linux "-DCMAKE_SYSTEM_PROCESSOR=${triplet%%-*}" \
        "-DCMAKE_CXX_COMPILER=$triplet-g++" "-DCMAKE_STRIP=/usr/bin/$triplet-strip" \
        "-DSODIUM_LIBRARY=/usr/lib/$triplet/libsodium.so" \
        -DBYTEPS_BUILD_PYTHON=OFF -DBYTEPS_WITH_RDMA=ON \
        "-DBYTEPS_VERSION=$(sed -n '/^version = "\([^"]*\)".*/{s//\1/p;q}' pyproject.toml)" \
    && cmake --build /build --target byteps-server \
    && cmake --install /build --strip --prefix /opt/byteps \
    && cp LICENSE NOTICE /opt/byteps/

# hadolint ignore=DL3006
FROM ${DEBIAN_IMAGE}

# Libraries for RDMA and encryption, loaded when a job needs them. The archive's snapshot decides their versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ibverbs-providers libibverbs1 librdmacm1 libsodium23 libssl3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log

# A numeric user, because Kubernetes checks runAsNonRoot against it.
RUN groupadd --gid 10001 byteps \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin byteps \
    && install -d -o 10001 -g 10001 /run/byteps

COPY --from=build /opt/byteps/ /opt/byteps/

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
