#!/usr/bin/env bash
# Builds the files that other machines install: wheels, and the server alone; see usage below.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib/system.sh
source "$root/scripts/lib/system.sh"

usage() {
  cat <<'TEXT'
usage: scripts/wheel.sh [--arch x86_64|aarch64]... [--server-only] [--out FOLDER]

Builds, in build/dist (or FOLDER), for x86-64 and arm64 (or the architectures named):

  megatron_byteps-VERSION-cp312-abi3-manylinux_2_34_ARCH.whl   for pip install, on Python 3.12 or later
  megatron_byteps-VERSION.tar.gz                               the same as a source distribution
  byteps-server-VERSION-linux-ARCH.tar.gz                      the server alone, where there is no Python

`pip install --find-links FOLDER megatron-byteps` then takes the one that fits the machine. The other architecture is
cross-compiled. Wheels and archives need no library but the C library (glibc 2.34: Debian
12, Ubuntu 22.04, RHEL 9): torch is not linked; libibverbs, librdmacm and the NVIDIA driver are
loaded when a job asks for them; the rest is inside. --server-only leaves all but the last out. Needs
build/venv: run scripts/setup.sh before. What was built is kept in ~/.cache/megatron-byteps
(MEGATRON_BYTEPS_CACHE) and taken from there the next time.
The same sources and compiler give the same bytes; SOURCE_DATE_EPOCH dates the files (default: 1980).
If the checkout changes during the build, this fails, and the folder is as before.
TEXT
}

architectures=()
server_only=0
out="$root/build/dist"
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --arch)
      case ${2:-} in
        x86_64 | aarch64) architectures+=("$2") ;;
        *) echo "error: --arch is '${2:-}', not x86_64 or aarch64" >&2; exit 2 ;;
      esac
      shift 2 ;;
    --server-only) server_only=1; shift ;;
    --out)
      [[ -n ${2:-} ]] || { echo "error: --out needs a folder" >&2; exit 2; }
      out=$2; shift 2 ;;
    *) echo "error: unknown argument: $1" >&2; usage >&2; exit 2 ;;
  esac
done
((${#architectures[@]})) || architectures=(x86_64 aarch64)

cache="${MEGATRON_BYTEPS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-byteps}"
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-315532800}" # the first time that a zip file can represent
venv="$root/build/venv"
source_tree="$root/build/byteps"
[[ -x $venv/bin/cmake ]] || { echo "error: no build/venv: run scripts/setup.sh" >&2; exit 1; }
mkdir -p "$cache" "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d "$root/build/wheel.XXXXXX")
made="$work/made"
mkdir "$made"
trap 'rm -rf "$work"' EXIT

say() { echo "wheel: $*" >&2; }

# long WHAT COMMAND...: runs the command and shows its progress. Its output is shown only if it fails.
long() {
  local what=$1
  shift
  "$venv/bin/python" "$root/scripts/progress.py" --name "wheel: $what" \
    --log "$work/${what//[^a-z0-9]/-}.log" -- "$@" >&2
}

# configure_for ARCH sets `options`, CMake's options.
configure_for() {
  options=(-DBYTEPS_STATIC_RUNTIME=ON -DBYTEPS_WITH_RDMA=ON
    "-DBYTEPS_SODIUM_SOURCE=$sodium")
  if [[ $1 != "$(uname -m)" ]]; then
    [[ $1 == aarch64 ]] || {
      echo "error: only arm64 can be cross-compiled; build for $1 on such a machine" >&2
      exit 1
    }
    command -v aarch64-linux-gnu-g++ >/dev/null || apt_install g++-aarch64-linux-gnu ||
      { echo "error: no aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)" >&2; exit 1; }
    options+=("-DCMAKE_TOOLCHAIN_FILE=$source_tree/cmake/aarch64-linux-gnu.cmake")
  fi
  # A builder may add CMake options, such as the path of a library.
  read -ra extra <<<"${BYTEPS_CMAKE_ARGS:-}"
  options+=("${extra[@]}")
}

# sources_key prints two hashes: of the patched BytePS, and of the other files of the checkout that are packed.
sources_key() {
  PYTHONPATH="$root" "$venv/bin/python" -B -S -m scripts.patchset tree-key byteps
  (cd "$root" && git ls-files -z --cached --others --exclude-standard -- Megatron-LM integrations patches upstream.lock \
    pyproject.toml README.md LICENSE NOTICE scripts/build_backend.py scripts/lib/launch.sh \
    scripts/{scheduler,server,status,worker}.sh deploy/systemd locks/base.lock |
    LC_ALL=C sort -z | xargs -0 sha256sum 2>/dev/null | sha256sum | cut -c -32)
}

# demand_same_sources exits if the checkout has changed since the start.
demand_same_sources() {
  [[ $(sources_key) != "$sources" ]] || return 0
  echo "error: the checkout changed while it was built, so nothing is kept. Run scripts/wheel.sh again, or build in" \
    "a clone that nobody edits" >&2
  exit 1
}

# build_key ARCH WHAT SOURCES: prints a key of everything that can change the result of building WHAT.
build_key() {
  local compiler=g++
  [[ $1 == "$(uname -m)" ]] || compiler=$1-linux-gnu-g++
  {
    "$compiler" --version | head -n 1
    echo "$* $sodium $SOURCE_DATE_EPOCH ${BYTEPS_CMAKE_ARGS:-} ${CXXFLAGS:-} ${LDFLAGS:-}"
    declare -f configure_for build_server build_wheel
  } | sha256sum | cut -c -32
}

# build_sdist: writes the source distribution.
build_sdist() {
  long "the source distribution" "$venv/bin/python" -c \
    'import sys, scripts.build_backend as backend; backend.build_sdist(sys.argv[1])' "$made" || exit 1
}

# build_wheel ARCH: prints the path of the wheel for other machines.
build_wheel() {
  local kept
  kept="$cache/ship/$(build_key "$1" wheel "$sources")"
  if ! compgen -G "$kept/*.whl" >/dev/null; then
    # The wheel is named after its target machine, because Python looks for nothing else.
    PATH="$venv/bin:$PATH" _PYTHON_HOST_PLATFORM="linux-$1" SKBUILD_CMAKE_ARGS="$(IFS=';'; echo "${options[*]}")" \
      long "the wheel for $1" "$venv/bin/python" -m pip --verbose wheel --no-deps --no-build-isolation \
      --disable-pip-version-check --config-settings "build-dir=$root/build/cmake-ship-$1" \
      --wheel-dir "$work/$1" "$root" || exit 1
    long "auditwheel for $1" \
      auditwheel --verbose repair --only-plat --wheel-dir "$work/$1/fit" "$work/$1"/*.whl || exit 1
    demand_same_sources
    keep "$work/$1/fit" "$kept"
  fi
  echo "$kept"/*.whl
}

# build_server ARCH: prints the path of the server without the rest of the wheel.
build_server() {
  local kept build
  kept="$cache/servers/$(build_key "$1" server "${sources%%$'\n'*}")"
  build="$root/build/cmake-ship-server-$1"
  # The executable is kept, so that another test or a fresh checkout need not build it again.
  if [[ ! -x $kept/byteps-server ]]; then
    long "cmake for $1" "$venv/bin/cmake" --fresh -G Ninja -S "$source_tree" -B "$build" "${options[@]}" \
      "-DCMAKE_MAKE_PROGRAM=$venv/bin/ninja" -DBYTEPS_BUILD_PYTHON=OFF "-DBYTEPS_VERSION=$version" &&
      long "byteps-server for $1" \
        "$venv/bin/cmake" --build "$build" --target byteps-server --parallel "$(nproc)" &&
      long "installing for $1" "$venv/bin/cmake" --install "$build" --strip --prefix "$work/prefix-$1" ||
      exit 1
    demand_same_sources
    keep "$work/prefix-$1/bin" "$kept"
  fi
  echo "$kept/byteps-server"
}

# pack_server ARCH EXECUTABLE: makes the archive, with the scripts that run the server.
pack_server() {
  local name folder
  name="byteps-server-$version-linux-$1"
  folder="$work/$name"
  mkdir -p "$folder"/{bin,scripts/lib,systemd}
  cp "$2" "$folder/bin/byteps-server"
  cp "$root"/scripts/{scheduler,server,status}.sh "$folder/scripts/"
  cp "$root"/scripts/lib/launch.sh "$folder/scripts/lib/"
  cp "$root"/deploy/systemd/* "$folder/systemd/"
  cp "$root"/{LICENSE,NOTICE,README.md} "$folder/"
  cp "$sodium"/libsodium-*/LICENSE "$folder/LICENSE.libsodium"
  tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
    --mtime="@$SOURCE_DATE_EPOCH" \
    -c "$name" | gzip -n >"$made/$name.tar.gz"
}

sodium=$(sodium_source "$cache")
fetch_sodium_source "$sodium"
version=$(sed -n 's/^version = "\([^"]*\)".*/\1/p' "$root/pyproject.toml" | head -n 1)
sources=$(sources_key)
if ! ((server_only)); then
  install_ship_tools "$root"
  cd "$root"
  build_sdist
fi

for arch in "${architectures[@]}"; do
  configure_for "$arch"
  if ((server_only)); then
    say "building byteps-server for $arch"
    executable=$(build_server "$arch")
  else
    say "building the wheel for $arch"
    wheel=$(build_wheel "$arch")
    mkdir -p "$work/unpacked-$arch"
    "$venv/bin/python" -m zipfile -e "$wheel" "$work/unpacked-$arch"
    executable=$(echo "$work/unpacked-$arch"/*.data/scripts/byteps-server)
    chmod +x "$executable"
    cp "$wheel" "$made/"
  fi
  pack_server "$arch" "$executable"
done
demand_same_sources
for file in "$made"/*; do
  mv "$file" "$out/"
  say "$out/${file##*/}, $(du -h "$out/${file##*/}" | cut -f 1)"
done
