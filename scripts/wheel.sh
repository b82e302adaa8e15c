#!/usr/bin/env bash
# Builds what other machines install: wheels, and the server alone; see usage below.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib/system.sh
source "$root/scripts/lib/system.sh"

usage() {
  cat <<'TEXT'
usage: scripts/wheel.sh [--arch x86_64|aarch64]... [--python PYTHON] [--server-only | --integrations-only] [--out FOLDER]

Builds, in build/dist (or FOLDER), for x86-64 and arm64 (or the architectures named):

  byteps-VERSION-cp312-cp312-manylinux_2_34_ARCH.whl   for pip install, where Python trains
  byteps-server-VERSION-linux-ARCH.tar.gz              the server alone, where there is no Python
  megatron_byteps_{ray,hf,rl}-VERSION-py3-none-any.whl  jobs under Ray, Hugging Face models, verl

The other architecture is cross-compiled. --python names another Python (3.12 or later) to build the
wheel for, which has to run here: the wheel is for its version, cp313 for example. The first two need no library but the C library (glibc 2.34: Debian
12, Ubuntu 22.04, RHEL 9): torch is not linked; libibverbs, librdmacm and the NVIDIA driver are
loaded when a job asks for them; the rest is inside. --server-only leaves the wheels out, and needs
no Python environment of that architecture; --integrations-only builds the last three alone. Needs build/venv: run scripts/setup.sh before. What was
built is kept in ~/.cache/megatron-byteps (MEGATRON_BYTEPS_CACHE) and taken from there the next time.
The same sources and compiler give the same bytes; SOURCE_DATE_EPOCH dates the files (default: 1980).
TEXT
}

architectures=()
server_only=0
integrations_only=0
python=
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
    --python)
      python_works "${2:-}" ||
        { echo "error: --python is '${2:-}', not a Python >= 3.12 that runs" >&2; exit 2; }
      python=$2; shift 2 ;;
    --server-only) server_only=1; shift ;;
    --integrations-only) integrations_only=1; shift ;;
    --out)
      [[ -n ${2:-} ]] || { echo "error: --out needs a folder" >&2; exit 2; }
      out=$2; shift 2 ;;
    *) echo "error: unknown argument: $1" >&2; usage >&2; exit 2 ;;
  esac
done
((${#architectures[@]})) || architectures=(x86_64 aarch64)
if ((server_only && integrations_only)); then
  echo "error: --server-only and --integrations-only leave nothing to build" >&2
  exit 2
fi

cache="${MEGATRON_BYTEPS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-byteps}"
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-315532800}" # the first moment that a zip file can name
venv="$root/build/venv"
source_tree="$root/build/byteps"
[[ -x $venv/bin/cmake ]] || { echo "error: no build/venv: run scripts/setup.sh" >&2; exit 1; }
mkdir -p "$cache" "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d "$root/build/wheel.XXXXXX")
trap 'rm -rf "$work"' EXIT

say() { echo "wheel: $*" >&2; }

# long WHAT COMMAND...: runs it, and shows how far it is; its output only if it fails.
long() {
  local what=$1
  shift
  "$venv/bin/python" "$root/scripts/progress.py" --name "wheel: $what" \
    --log "$work/${what//[^a-z0-9]/-}.log" -- "$@" >&2
}

# configure_for ARCH sets `options`, what CMake is told.
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
  # Words for CMake that a builder adds, such as where a library lies.
  read -ra extra <<<"${BYTEPS_CMAKE_ARGS:-}"
  options+=("${extra[@]}")
}

# build_key ARCH WHAT: whatever can change the outcome of building WHAT.
build_key() {
  local compiler=g++
  [[ $1 == "$(uname -m)" ]] || compiler=$1-linux-gnu-g++
  {
    PYTHONPATH="$root" "$venv/bin/python" -B -m scripts.patchset tree-key byteps
    "$compiler" --version | head -n 1
    echo "$* $sodium $SOURCE_DATE_EPOCH ${BYTEPS_CMAKE_ARGS:-} ${CXXFLAGS:-} ${LDFLAGS:-}"
    declare -f configure_for build_server build_wheel
  } | sha256sum | cut -c -32
}

# find_builder sets `builder`, the command that is the Python to build for. What builds wheels is
# Python alone and lies in build/venv: another version takes it from there.
find_builder() {
  builder=("$venv/bin/python")
  [[ -z $python ]] ||
    builder=(env "PYTHONPATH=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" "$python")
}

# build_wheel ARCH: prints the path of the wheel, fit for others.
build_wheel() {
  local tag kept
  tag=$("${builder[@]}" -c 'import sys; print("cpython-%d%d" % sys.version_info[:2])')
  kept="$cache/ship/$(build_key "$1" "wheel $tag $(sha256sum <"$root/locks/base.lock")")"
  if ! compgen -G "$kept/*.whl" >/dev/null; then
    # The wheel and the module are named after the machine that they are for: Python looks for
    # nothing else. One folder for all versions of Python: most of it does not depend on them.
    PATH="$venv/bin:$PATH" _PYTHON_HOST_PLATFORM="linux-$1" \
      SKBUILD_CMAKE_ARGS="$(IFS=';'; echo "${options[*]};-DBYTEPS_MODULE_SUFFIX=.$tag-$1-linux-gnu.so")" \
      long "the wheel for $1" "${builder[@]}" -m pip --verbose wheel --no-deps --no-build-isolation \
      --disable-pip-version-check --config-settings "build-dir=$root/build/cmake-ship-$1" \
      --wheel-dir "$work/$1" "$source_tree" || exit 1
    long "auditwheel for $1" \
      auditwheel --verbose repair --only-plat --wheel-dir "$work/$1/fit" "$work/$1"/*.whl || exit 1
    keep "$work/$1/fit" "$kept"
  fi
  echo "$kept"/*.whl
}

# build_server ARCH: prints the path of the server alone.
build_server() {
  local kept build
  kept="$cache/servers/$(build_key "$1" server)"
  build="$root/build/cmake-ship-server-$1"
  # A test that wants it again, or a fresh checkout, need not build it.
  if [[ ! -x $kept/byteps-server ]]; then
    long "cmake for $1" "$venv/bin/cmake" -G Ninja -S "$source_tree" -B "$build" "${options[@]}" \
      "-DCMAKE_MAKE_PROGRAM=$venv/bin/ninja" -DBYTEPS_BUILD_PYTHON=OFF "-DBYTEPS_VERSION=$version" &&
      long "byteps-server for $1" \
        "$venv/bin/cmake" --build "$build" --target byteps-server --parallel "$(nproc)" &&
      long "installing for $1" "$venv/bin/cmake" --install "$build" --strip --prefix "$work/prefix-$1" ||
      exit 1
    keep "$work/prefix-$1/bin" "$kept"
  fi
  echo "$kept/byteps-server"
}

# pack_server ARCH EXECUTABLE: the archive, with the scripts that run it.
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
    -c "$name" | gzip -n >"$out/$name.tar.gz"
  say "$out/$name.tar.gz, $(du -h "$out/$name.tar.gz" | cut -f 1)"
}

# build_integrations: wheels of integrations/*, pure Python and for all machines.
build_integrations() {
  local folder copy copies=()
  for folder in "$root"/integrations/*/; do
    # A build leaves files where it runs.
    copy="$work/integrations/$(basename "$folder")"
    mkdir -p "$copy"
    cp -r "$folder"/{pyproject.toml,megatron_byteps_"$(basename "$folder")"} \
      "$root"/{LICENSE,NOTICE} "$copy"
    copies+=("$copy")
  done
  long "the wheels of integrations" \
    "$venv/bin/python" -m pip wheel --no-deps --no-build-isolation --disable-pip-version-check \
    --wheel-dir "$work/wheels" "${copies[@]}" || exit 1
  cp "$work/wheels"/*.whl "$out/"
  say "$out/megatron_byteps_*.whl"
}

if ! ((server_only)); then build_integrations; fi
if ((integrations_only)); then exit; fi

sodium=$(sodium_source "$cache")
fetch_sodium_source "$sodium"
if ! ((server_only)); then
  install_ship_tools "$root"
  find_builder
fi
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$source_tree/pyproject.toml")

for arch in "${architectures[@]}"; do
  configure_for "$arch"
  if ((server_only)); then
    say "building byteps-server for $arch"
    executable=$(build_server "$arch")
  else
    say "building the wheel for $arch, $("${builder[@]}" -V)"
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
