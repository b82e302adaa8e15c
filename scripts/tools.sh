#!/usr/bin/env bash
# Installs tools of some tests, builds the documentation, and cleans up; see usage below.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib/system.sh
source "$root/scripts/lib/system.sh"
cache="${MEGATRON_BYTEPS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-byteps}"

usage() {
  cat <<'TEXT'
usage: scripts/tools.sh TOOL [-h]

Print where a tool is, and install it where it is missing (Debian and Ubuntu, as root or with sudo). Only some tests
need them, so that make setup leaves them alone:

  clang          the newest clang++ that has its run-time libraries, for sanitizers, fuzzers and the check of lock
                 annotations
  valgrind       valgrind, for thorough tests
  promtool       promtool, which checks the alerts of Prometheus; from Debian's package, unpacked in the cache
  nvrx           the folder of nvidia-resiliency-ext, for Megatron's local checkpoints; in the cache. Its wheel asks for
                 glibc 2.39 for the sake of a profiler, which nothing here uses. Needs build/venv
  torch VERSION  the Python of an environment that has torch VERSION, 2.9, 2.11, 2.14 or 2.15, as locks/torch-*.lock pins it, and
                 what tests need but byteps (build/python). It lies in the cache, under a name made of all that is in it,
                 and is made if it is not there. Needs build/venv: run scripts/setup.sh before

Make the documentation:

  site           builds docs/ as a site in build/site (open index.html), and fails for a link that leads nowhere
  diagrams       draws docs/diagrams/*.dot as docs/images/*.svg, with Graphviz (Debian's package graphviz). Each
                 picture carries the checksum of its source; a test compares them

Remove what the project's scripts made:

  clean [--cache] [--force]
                 removes build/. Refuses while build/ holds commits that were not exported or changes that were not
                 committed, unless --force. --cache also removes downloads and built wheels, that is what the project
                 keeps in the cache

environment:
  MEGATRON_BYTEPS_CACHE   the cache (default: ~/.cache/megatron-byteps)
TEXT
}

fail() {
  echo "error: $*" >&2
  exit 1
}

find_clang() {
  local compiler version folder
  for version in -21 -20 -19 -18 -17 -16 "" -15 -14; do
    compiler="$(command -v "clang++$version")" || continue
    folder="$("$compiler" -print-resource-dir 2>/dev/null)" || continue
    compgen -G "$folder/lib/*/*fuzzer*" >/dev/null || continue
    echo "$compiler"
    return 0
  done
  return 1
}

clang() {
  find_clang && return 0
  apt_install clang-19 libclang-rt-19-dev llvm-19 >&2 || apt_install clang llvm >&2 || true
  find_clang || fail "please install (Debian's names): clang-19 libclang-rt-19-dev llvm-19"
}

promtool() {
  type -P promtool && return 0
  local kept="$cache/promtool" new
  if [[ ! -x $kept/usr/bin/promtool ]]; then
    new="$(mktemp -d)"
    trap 'rm -rf "$new"' RETURN
    (cd "$new" && apt-get download -qq prometheus >&2 && dpkg -x ./*.deb unpacked) ||
      fail "please install promtool (Debian's package prometheus)"
    mkdir -p "$cache"
    keep "$new/unpacked" "$kept"
  fi
  echo "$kept/usr/bin/promtool"
}

# nvrx: prints the folder from which the package is imported. The same wheel serves every machine, because only its
# Python is used.
nvrx() {
  local kept="$cache/nvrx-0.7.0" new
  if [[ ! -d $kept ]]; then
    find_uv "$root" "$cache" || fail "no uv: run scripts/setup.sh"
    use_uv "$cache"
    new="$kept.$BASHPID"
    # shellcheck disable=SC2064 # this folder
    trap "rm -rf '$new'" EXIT
    "$uv" pip install --quiet --target "$new" --no-deps --require-hashes --python-version 3.12 \
      --python "$root/build/venv/bin/python" --python-platform x86_64-manylinux_2_39 --requirements - >&2 <<'TEXT' ||
nvidia-resiliency-ext==0.7.0 --hash=sha256:e0c646ccae211de81a4c2b5bb5cff96a5e12af1373fb0eb818a40716eef685ad
TEXT
      fail "nvidia-resiliency-ext 0.7.0 cannot be installed"
    keep "$new" "$kept"
  fi
  echo "$kept"
}

# torch VERSION LOCK: prints the folder of an environment with this torch.
torch() {
  local key kept base
  find_uv "$root" "$cache" || fail "no uv: run scripts/setup.sh"
  use_uv "$cache"
  unset VIRTUAL_ENV PYTHONPATH PYTHONHOME
  key="$({ cat "$2" && declare -f torch && "$root/build/venv/bin/python" -VV; } |
    sha256sum | cut -c -16)"
  kept="$cache/torch/$1-$key"
  if [[ ! -d $kept ]]; then
    new="$kept.$BASHPID"
    trap 'rm -rf "$new"' EXIT
    base="$("$root/build/venv/bin/python" -c 'import sys; print(sys._base_executable)')"
    "$uv" venv --quiet --relocatable --python "$base" "$new"
    # Hard links to files in the cache save 5 GB per version, and the files do not change.
    "$uv" pip sync --quiet --link-mode hardlink --python "$new/bin/python" --require-hashes "$2" >&2
    PYTHONPATH="$root/build/python" "$new/bin/python" -c 'import byteps.torch' >&2
    keep "$new" "$kept"
  fi
  echo "$kept/bin/python"
}

site() {
  cd "$root"
  install_ship_tools "$root"
  # The theme's notice about its future is not meant for this project's users.
  NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict
  echo "site: build/site/index.html"
}

diagrams() {
  local source name picture
  command -v dot >/dev/null || fail "Graphviz is not installed: apt-get install graphviz"
  for source in "$root"/docs/diagrams/*.dot; do
    name=$(basename "$source" .dot)
    picture="$root/docs/images/$name.svg"
    dot -Tsvg "$source" >"$picture.part"
    echo "<!-- source: $(sha256sum <"$source" | cut -c -64) -->" >>"$picture.part"
    mv "$picture.part" "$picture"
    echo "docs/images/$name.svg"
  done
}

# clean CACHE FORCE: removes build outputs; both are 1 or 0.
clean() {
  local python
  if ((!$2)) && [[ -e "$root/build/byteps" || -e "$root/build/Megatron-LM" ]]; then
    python="$root/build/venv/bin/python"
    python_works "$python" || python="$(find_python)" ||
      fail "no Python >= 3.12 to look for unexported work with; --force skips that"
    PYTHONPATH="$root" "$python" -B -S -m scripts.patchset guard
  fi
  rm -rf "$root/build"
  if (($1)); then
    # The folders are listed by name, because the folder of the variable may contain other things.
    rm -rf "$cache/sdists" "$cache/wheels" "$cache/servers" "$cache/ship" "$cache/images" \
      "$cache"/libsodium-* "$cache/vm" "$cache/promtool" "$cache"/nvrx-* "$cache/uv" "$cache"/uv-[0-9a-f]*
    rmdir "$cache" 2>/dev/null || true
  fi
}

bad_use() {
  echo "error: $*" >&2
  usage >&2
  exit 2
}

tool="${1:-}"
(($# == 0)) || shift
for argument in "$tool" "$@"; do
  if [[ $argument == -h || $argument == --help ]]; then
    usage
    exit 0
  fi
done
case "$tool" in
  clang | valgrind | promtool | nvrx | site | diagrams) (($# == 0)) || bad_use "$tool takes no arguments, got: $*" ;;&
  clang | promtool | nvrx | site | diagrams) "$tool" ;;
  valgrind)
    setup_valgrind >&2
    command -v valgrind
    ;;
  torch)
    version="${1:-}"
    lock="$root/locks/torch-${version//./-}.lock"
    (($# == 1)) && [[ -f $lock ]] || bad_use "torch takes 2.9, 2.11, 2.14 or 2.15, got: $*"
    torch "$version" "$lock"
    ;;
  clean)
    with_cache=0
    force=0
    for argument in "$@"; do
      case "$argument" in
        --cache) with_cache=1 ;;
        --force) force=1 ;;
        *) bad_use "clean takes --cache and --force, got: $argument" ;;
      esac
    done
    clean "$with_cache" "$force"
    ;;
  *) bad_use "tools.sh needs a tool, got: ${tool:-nothing}" ;;
esac
