#!/usr/bin/env bash
# Builds the container images; see usage below.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib/system.sh
source "$root/scripts/lib/system.sh"

usage() {
  cat <<'TEXT'
usage: scripts/images.sh [server] [worker] [--with ray|hf|rl] [--platform linux/amd64,linux/arm64]
                         [--dist FOLDER] [--save FOLDER] [--context FOLDER] [--engine]

Builds the images byteps-server (both platforms) and megatron-byteps-worker (this machine's), or the
one named, with docker or else buildah, whichever is there. Versions come from docker/versions.env; a
variable of the same name wins, for example DEBIAN_IMAGE=my.registry/debian:bookworm-slim, or
CUDA_IMAGE=ubuntu:24.04 for a worker without CUDA's base. The server is compiled in its image. The worker's
wheel is taken from build/dist (scripts/wheel.sh); its base has to have Python 3.12 or later.

  --with NAME       the worker with what jobs under Ray (ray), Hugging Face models and Ray (hf) or verl
                    (rl) need: megatron-byteps-worker-NAME. hf needs a base with Python 3.12, rl one
                    with 3.12 or 3.13
  --platform LIST   platforms of the server's image
  --dist FOLDER     the wheels, instead of build/dist
  --save FOLDER     also write each image there, as NAME-TAG[-ARCH].image.tar.gz for docker load
  --context FOLDER  only lay out the worker's build context there, as worker/; the server's is the checkout
  --engine          only print what would build: docker or buildah

Installing packages for another platform needs qemu-user-static and its binfmt_misc entry. With buildah,
BUILDAH_ISOLATION=chroot builds where containers cannot be started.
TEXT
}

images=()
platforms=linux/amd64,linux/arm64
context=
dist="$root/build/dist"
save=
engine_only=0
with=base
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    server | worker) images+=("$1"); shift ;;
    --with)
      case ${2:-} in
        ray | hf | rl) with=$2 ;;
        *) echo "error: --with is '${2:-}', not ray, hf or rl" >&2; exit 2 ;;
      esac
      shift 2 ;;
    --platform | --dist | --save | --context)
      [[ -n ${2:-} ]] || { echo "error: $1 needs a value" >&2; exit 2; }
      case $1 in
        --platform) platforms=$2 ;;
        --dist) dist=$2 ;;
        --save) save=$2 ;;
        --context) context=$2 ;;
      esac
      shift 2 ;;
    --engine) engine_only=1; shift ;;
    *) echo "error: unknown argument: $1" >&2; usage >&2; exit 2 ;;
  esac
done
((${#images[@]})) || images=(server worker)

# A variable that the caller has set overrides the file.
while IFS='=' read -r name value; do
  [[ $name =~ ^[A-Z_]+$ ]] || continue
  [[ -n ${!name:-} ]] || declare "$name=$value"
done <"$root/docker/versions.env"

say() { echo "images: $*" >&2; }

fail() {
  echo "error: $*" >&2
  exit 1
}

# long WHAT COMMAND...: runs the command and shows its progress. docker shows progress by itself.
long() {
  local what=$1
  shift
  if [[ -x $root/build/venv/bin/python ]]; then
    "$root/build/venv/bin/python" "$root/scripts/progress.py" --name "images: $what" \
      --log "$work/${what//[^a-z0-9]/-}.log" -- "$@"
  else
    "$@"
  fi
}

# find_engine sets `engine`.
find_engine() {
  if command -v docker >/dev/null && docker info >/dev/null 2>&1; then
    engine=docker
  elif command -v buildah >/dev/null; then
    engine=buildah
  else
    fail "neither a running docker nor buildah is here (Debian: apt-get install buildah)"
  fi
}

if ((engine_only)); then
  find_engine
  echo "$engine"
  exit
fi

work="$root/build/images"
[[ -z $context ]] || work=$context
mkdir -p "$work"

# package_version prints the version of the distribution.
package_version() {
  sed -n 's/^version = "\([^"]*\)".*/\1/p' "$root/pyproject.toml" | head -n 1
}

worker_context() {
  local wheels version python
  version=$(package_version)
  mapfile -t wheels < <(compgen -G "$dist/megatron_byteps-$version-*-manylinux*_$(uname -m).whl")
  ((${#wheels[@]})) || fail "no wheel of $version for $(uname -m) in $dist: run make wheel"
  rm -rf "$work/worker"
  mkdir -p "$work/worker/wheels" "$work/worker/locks" "$work/worker/scripts/lib"
  cp "${wheels[@]}" "$work/worker/wheels/"
  cp "$root"/locks/{base,bootstrap}.lock "$work/worker/locks/"
  if [[ $with != base ]]; then
    python=$(find_python) || fail "no Python >= 3.12 was found; set PYTHON"
    "$python" -B "$root/scripts/locks.py" show "$with" >"$work/worker/locks/$with.lock"
  fi
  cp "$root"/scripts/worker.sh "$work/worker/scripts/"
  cp "$root"/scripts/lib/launch.sh "$work/worker/scripts/lib/"
  # The worker's image gets the patched tree without its history and build outputs.
  mkdir -p "$work/worker/Megatron-LM"
  git -C "$root/build/Megatron-LM" archive HEAD | tar -x -C "$work/worker/Megatron-LM"
}

IFS=, read -ra list <<<"$platforms"
revision=$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)
labels=(--build-arg "VERSION=$IMAGE_TAG" --build-arg "REVISION=$revision")

for image in "${images[@]}"; do
  if [[ $image == worker ]]; then
    say "laying out the context of $image"
    worker_context
  fi
done
[[ -z $context ]] || exit 0
find_engine

# save_image TAG: writes the image to the folder of --save.
save_image() {
  [[ -n $save ]] || return 0
  local file="$save/${1/:/-}.image.tar"
  mkdir -p "$save"
  if [[ $engine == docker ]]; then
    docker save --output "$file" "$1"
  else
    long "saving ${1%%:*}" buildah push "$1" "docker-archive:$file:$1"
  fi
  gzip -nf "$file"
}

# build NAME TAG PLATFORM CONTEXT ARGUMENT...
build() {
  local name=$1 tag=$2 platform=$3 context=$4
  shift 4
  say "building $tag for $platform with $engine"
  if [[ $engine == docker ]]; then
    docker build --platform "$platform" --file "$root/docker/$name.Dockerfile" --tag "$tag" \
      "${labels[@]}" "$@" "$context"
  else
    # Only the docker format keeps the health check.
    long "$name, $platform" buildah bud --format docker --platform "$platform" \
      --file "$root/docker/$name.Dockerfile" --tag "$tag" \
      --build-arg "TARGETPLATFORM=$platform" "${labels[@]}" "$@" "$context"
  fi
  save_image "$tag"
}

# image_for NAME PLATFORM: prints the name of the image for a platform. buildah takes a name for a single platform in all
# stages, so with buildah this is the image's ID.
image_for() {
  if [[ $engine == docker ]]; then
    echo "$1"
  else
    buildah pull --quiet --platform "$2" "$1"
  fi
}

native=linux/amd64
[[ $(uname -m) == x86_64 ]] || native=linux/arm64
for image in "${images[@]}"; do
  if [[ $image == server ]]; then
    build_image=$(image_for "${BUILD_IMAGE:-$DEBIAN_IMAGE}" "$native")
    for platform in "${list[@]}"; do
      base_image=$(image_for "$DEBIAN_IMAGE" "$platform")
      build server "byteps-server:$IMAGE_TAG-${platform#linux/}" "$platform" "$root" \
        --build-arg "DEBIAN_IMAGE=$base_image" --build-arg "BUILD_IMAGE=$build_image"
    done
  else
    platform=$native
    name=megatron-byteps-worker
    [[ $with == base ]] || name+="-$with"
    build worker "$name:$IMAGE_TAG" "$platform" "$work/worker" \
      --build-arg "CUDA_IMAGE=$CUDA_IMAGE" --build-arg "WITH=$with"
  fi
done
say "done"
