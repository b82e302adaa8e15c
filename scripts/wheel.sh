#!/usr/bin/env bash
# Builds what other machines install: wheels, and the server alone; see usage below.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib/system.sh
source "$root/scripts/lib/system.sh"
# shellcheck source=scripts/lib/ship_tools.sh
source "$root/scripts/lib/ship_tools.sh"
# shellcheck source=scripts/lib/library_sources.sh
source "$root/scripts/lib/library_sources.sh"

usage() {
  cat <<'TEXT'
usage: scripts/wheel.sh [--arch x86_64|aarch64]... [--server-only] [--out FOLDER]

Builds, in build/dist (or FOLDER), for x86-64 and arm64 (or the architectures named):

  byteps-VERSION-cp312-cp312-manylinux_2_34_ARCH.whl   for pip install, where Python trains
  byteps-server-VERSION-linux-ARCH.tar.gz              the server alone, where there is no Python

The other architecture is cross-compiled. Both need no library but the C library (glibc 2.34: Debian
12, Ubuntu 22.04, RHEL 9): torch is not linked; libibverbs, librdmacm and the NVIDIA driver are
loaded when a job asks for them; the rest is inside. --server-only leaves the wheels out, and needs
no Python environment of that architecture. Needs build/venv: run scripts/setup.sh before.
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
venv="$root/build/venv"
source_tree="$root/build/byteps"
[[ -x $venv/bin/cmake ]] || { echo "error: no build/venv: run scripts/setup.sh" >&2; exit 1; }
mkdir -p "$cache" "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d "$root/build/wheel.XXXXXX")
trap 'rm -rf "$work"' EXIT

say() { echo "wheel: $*" >&2; }

# configure_for ARCH sets `options`, what CMake is told.
configure_for() {
  options=(-DBYTEPS_STATIC_RUNTIME=ON -DBYTEPS_WITH_RDMA=ON -DBYTEPS_WITH_PROMETHEUS=ON
    "-DBYTEPS_PROMETHEUS_SOURCE=$prometheus" "-DBYTEPS_SODIUM_SOURCE=$sodium")
  if [[ $1 != "$(uname -m)" ]]; then
    [[ $1 == aarch64 ]] || {
      echo "error: only arm64 can be cross-compiled; build for $1 on such a machine" >&2
      exit 1
    }
    command -v aarch64-linux-gnu-g++ >/dev/null || apt_install g++-aarch64-linux-gnu ||
      { echo "error: no aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)" >&2; exit 1; }
    options+=("-DCMAKE_TOOLCHAIN_FILE=$source_tree/cmake/aarch64-linux-gnu.cmake")
  fi
  # Words for CMake that a builder adds, such as where a library lies.
  read -ra extra <<<"${BYTEPS_CMAKE_ARGS:-}"
  options+=("${extra[@]}")
}

# server_key ARCH: whatever can change the outcome of building the server alone.
server_key() {
  local compiler=g++
  [[ $1 == "$(uname -m)" ]] || compiler=$1-linux-gnu-g++
  {
    "$venv/bin/python" -B "$root/scripts/patchset.py" tree-key byteps
    "$compiler" --version | head -n 1
    echo "$1 $prometheus $sodium ${BYTEPS_CMAKE_ARGS:-} ${CXXFLAGS:-} ${LDFLAGS:-}"
    cat "$root/scripts/wheel.sh"
  } | sha256sum | cut -c -32
}

# build_wheel ARCH: prints the path of the wheel, fit for others.
build_wheel() {
  local tag
  tag=$("$venv/bin/python" -c 'import sys; print("cpython-%d%d" % sys.version_info[:2])')
  # Names the extension and the wheel after the machine that they are for.
  PATH="$venv/bin:$PATH" SKBUILD_CMAKE_ARGS="$(IFS=';'; echo "${options[*]}")" \
    _PYTHON_HOST_PLATFORM="linux-$1" SETUPTOOLS_EXT_SUFFIX=".$tag-$1-linux-gnu.so" \
    "$venv/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation \
    --disable-pip-version-check --config-settings "build-dir=$root/build/cmake-ship-$1" \
    --wheel-dir "$work/$1" "$source_tree" >&2
  auditwheel --verbose repair --only-plat --wheel-dir "$work/$1/fit" "$work/$1"/*.whl >"$work/audit.log" 2>&1 ||
    { cat "$work/audit.log" >&2; exit 1; }
  echo "$work/$1/fit"/*.whl
}

# pack_server ARCH EXECUTABLE: the archive, with the scripts that run it.
pack_server() {
  local name folder
  name="byteps-server-$version-linux-$1"
  folder="$work/$name"
  mkdir -p "$folder"/{bin,scripts/lib,systemd}
  cp "$2" "$folder/bin/byteps-server"
  cp "$root"/scripts/{scheduler,server}.sh "$folder/scripts/"
  cp "$root"/scripts/lib/launch.sh "$folder/scripts/lib/"
  cp "$root"/deploy/systemd/* "$folder/systemd/"
  cp "$root"/{LICENSE,NOTICE,README.md} "$folder/"
  # The same bytes from the same inputs.
  tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@${SOURCE_DATE_EPOCH:-0}" \
    -c "$name" | gzip -n >"$out/$name.tar.gz"
  say "$out/$name.tar.gz, $(du -h "$out/$name.tar.gz" | cut -f 1)"
}

release=$(. /etc/os-release && echo "$ID-$VERSION_ID")
prometheus="$cache/prometheus-cpp-$release"
fetch_prometheus_source "$prometheus"
sodium="$cache/libsodium-$release"
fetch_sodium_source "$sodium"
((server_only)) || install_ship_tools "$root"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$source_tree/pyproject.toml")

for arch in "${architectures[@]}"; do
  configure_for "$arch"
  if ((server_only)); then
    say "building byteps-server for $arch"
    executable="$cache/servers/$(server_key "$arch")/byteps-server"
    build="$root/build/cmake-ship-server-$arch"
    [[ -x $executable ]] || {
      "$venv/bin/cmake" -G Ninja -S "$source_tree" -B "$build" "${options[@]}" \
        "-DCMAKE_MAKE_PROGRAM=$venv/bin/ninja" -DBYTEPS_BUILD_PYTHON=OFF "-DBYTEPS_VERSION=$version" &&
      "$venv/bin/cmake" --build "$build" --target byteps-server --parallel "$(nproc)" &&
      "$venv/bin/cmake" --install "$build" --strip --prefix "$work/prefix-$arch"
    } >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
    # A test that wants it again, or a fresh checkout, need not build it.
    if [[ ! -x $executable ]]; then
      mkdir -p "${executable%/*}"
      mv "$work/prefix-$arch/bin/byteps-server" "$executable"
    fi
  else
    say "building the wheel for $arch"
    wheel=$(build_wheel "$arch")
    mkdir -p "$work/unpacked-$arch"
    "$venv/bin/python" -m zipfile -e "$wheel" "$work/unpacked-$arch"
    executable=$(echo "$work/unpacked-$arch"/*.data/scripts/byteps-server)
    chmod +x "$executable"
    cp "$wheel" "$out/"
    say "$out/$(basename "$wheel"), $(du -h "$wheel" | cut -f 1)"
  fi
  pack_server "$arch" "$executable"
done
