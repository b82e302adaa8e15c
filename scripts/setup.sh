#!/usr/bin/env bash
# Makes everything that the project needs, in build/; see usage below.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib/system.sh
source "$root/scripts/lib/system.sh"

usage() {
  cat <<'TEXT'
usage: scripts/setup.sh [--ray] [--hf] [--rl] [--s3] [--frameworks] [-h]

Installs missing system packages (Debian and Ubuntu, as root or with sudo), makes the Python
environment build/venv from locks/base.lock, assembles and patches the upstream trees in build/,
builds byteps in build/python, and installs Megatron-LM from its tree. Safe to run again: what is up
to date is left alone, and a run with nothing to do takes a second or two. Python of the overlay is
linked: a change of it needs no build.

  --ray   also make build/venv-ray, with locks/ray.lock: the same, with Ray
  --hf    also make build/venv-hf, with locks/hf.lock: the same, with transformers, peft,
          Megatron-Bridge (which needs Python 3.12) and Ray
  --rl    also make build/venv-rl, with locks/rl.lock: the same, with verl, Ray,
          transformers and Megatron-Bridge (Python 3.12)
  --s3    also make build/venv-s3, with locks/s3.lock: that of --ray, with Megatron's storage
          client, and servers of S3 and of Google Cloud Storage for tests
  --frameworks
          also make build/venv-frameworks, with locks/frameworks.lock: the same, with torchtitan,
          Lightning, transformers and DeepSpeed

environment:
  PYTHON                  the Python (>= 3.12) to use; otherwise found on PATH, under pyenv or by uv
  MEGATRON_BYTEPS_CACHE   downloads and built wheels (default: ~/.cache/megatron-byteps)
  UV_CACHE_DIR            uv's packages (default: uv/ in that cache)
TEXT
}

with_ray=0
with_hf=0
with_rl=0
with_s3=0
with_frameworks=0
for argument; do
  case "$argument" in
    --ray) with_ray=1 ;;
    --hf) with_hf=1 ;;
    --rl) with_rl=1 ;;
    --s3) with_s3=1 ;;
    --frameworks) with_frameworks=1 ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      echo "error: setup.sh takes --ray, --hf, --rl, --s3, --frameworks or nothing, got: $*" >&2
      usage >&2
      exit 2
      ;;
  esac
done

cache="${MEGATRON_BYTEPS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-byteps}"
venv="$root/build/venv"
stamps="$venv/.megatron-byteps"
package="$root/build/python"
logs="$root/build/logs"
use_uv "$cache"
# An activated environment of the user must not affect the setup.
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
mkdir -p "$root/build" "$logs" "$cache"

# tell NAME LOG: every ten seconds, prints the step's time and the last line of its log.
tell() {
  local seconds=0 never
  exec {never}<> <(:) # nothing writes to it
  while ! read -r -t 10 -u "$never" && kill -0 $$ 2>/dev/null; do
    ((seconds += 10))
    printf 'setup: %-14s %4d s so far: %s\n' "$1" "$seconds" \
      "$(tail -n 1 "$2" 2>/dev/null | tr -cd '[:print:]' | cut -c -70)"
  done
}

# step NAME COMMAND...: runs the command and prints its time. The output goes to a log, which is shown on failure.
step() {
  local name="$1" begin=$EPOCHREALTIME log status teller
  log="$logs/setup-${name// /-}.log"
  shift
  tell "$name" "$log" 9>&- &
  teller=$!
  # shellcheck disable=SC2064 # the pid of this step
  trap "kill $teller 2>/dev/null" EXIT
  # `if ! command` is not used, because bash would ignore failures inside a function there.
  set +e
  (set -e && "$@") >"$log" 2>&1 </dev/null
  status=$?
  kill "$teller" 2>/dev/null
  wait "$teller" 2>/dev/null
  trap - EXIT
  set -e
  if ((status != 0)); then
    # The end of the log is pip's own traceback. What CMake or the compiler has printed is far above.
    printf 'setup: %s FAILED; errors in %s, and its end:\n' "$name" "${log#"$root"/}" >&2
    grep -m 10 -A 3 -E 'CMake Error|error: |^error|FAILED: ' "$log" >&2 || true
    printf -- '...\n' >&2
    tail -n 30 "$log" >&2
    exit 1
  fi
  grep -E '^(note|warning):' "$log" >&2 || true
  local took=$((${EPOCHREALTIME/./} - ${begin/./}))
  printf 'setup: %-14s %4d.%d s\n' "$name" $((took / 1000000)) $((took / 100000 % 10))
}

hash_of() {
  sha256sum | cut -c -64
}

current() {
  [[ -f "$stamps/$1" && "$(<"$stamps/$1")" == "$2" ]]
}

stamp() {
  mkdir -p "$stamps"
  echo "$2" >"$stamps/$1"
}

# bootstrap_uv needs any Python 3 with pip. An incomplete folder never counts as complete.
bootstrap_uv() {
  local folder python new
  folder="$(dirname "$(dirname "$uv")")"
  for python in "${PYTHON:-}" "$(find_python || true)" python3 /usr/bin/python3; do
    [[ -n "$python" ]] || continue
    new="$folder.$BASHPID"
    # The folder's scripts contain its old path, but uv itself is a plain executable.
    if "$python" -m venv "$new" && "$new/bin/python" -m pip install \
      --disable-pip-version-check --require-hashes -r "$root/locks/bootstrap.lock" &&
      keep "$new" "$folder"; then
      return 0
    fi
    rm -rf "$new"
  done
  echo "error: could not install uv: it needs a python3 with venv and pip (python3-venv)"
  return 1
}

# Debian has separate packages for parts of Python that the bootstrap and the compiled helpers need.
setup_python() {
  local python version missing=()
  if ! find_python >/dev/null && ! command -v python3 >/dev/null 2>&1; then
    apt_install python3 python3-venv python3-dev || true
  fi
  if ! find_uv "$root" "$cache"; then
    python="$(find_python || command -v python3 || true)"
    [[ -n "$python" ]] && ! "$python" -c 'import ensurepip' && missing+=(venv)
  fi
  if python="$(find_python)" && ! "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'; then
    missing+=(dev)
  fi
  if ((${#missing[@]} > 0)); then
    version="$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
    apt_install "${missing[@]/#/$version-}" ||
      echo "warning: $version lacks ${missing[*]} (Debian: ${missing[*]/#/$version-})"
  fi
  find_uv "$root" "$cache" || bootstrap_uv
}

# fits PYTHON VERSION: succeeds if the Python has this version. Any version fits if VERSION is empty.
fits() {
  [[ -z "$2" || "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" == "$2" ]]
}

# make_venv [VERSION]: makes an environment with Python >= 3.12, or with exactly this version.
make_venv() {
  local python wanted="${1:->=3.12}"
  if ! { python="$(find_python)" && fits "$python" "${1:-}"; }; then
    python="$("$uv" python find "$wanted" 2>/dev/null)" ||
      { "$uv" python install 3.12 && python="$("$uv" python find "$wanted")"; } || {
      echo "error: no Python $wanted: install it (Ubuntu 24.04: apt-get install python3-dev;" \
        "anywhere: uv python install 3.12) or set PYTHON"
      return 1
    }
  fi
  "$uv" venv --quiet --clear --python "$python" "$venv"
}

# install_requirements KEY GROUP: installs the packages of a dependency group.
install_requirements() {
  local all="$venv/.requirements"
  "$venv/bin/python" -B "$root/scripts/locks.py" show "$2" >"$all"
  "$uv" pip sync --python "$venv/bin/python" --require-hashes "$all"
  # The sync has also removed the packages that are installed below.
  rm -rf "$stamps"
  stamp requirements "$1"
}

# overlay_python: prints the overlay's Python files by their paths in the package.
overlay_python() {
  (cd "$root/byteps" && find byteps -name '*.py' -o -name '*.pyi') | LC_ALL=C sort
}

# wheel_sources: prints hashes of the wheel's inputs. Python files are left out because they are linked, and data
# because it is read in the checkout.
wheel_sources() {
  sed '/^\[dependency-groups\]/,$d' "$root/pyproject.toml"
  cat "$root/scripts/build_backend.py"
  (cd "$root/build/byteps" && git ls-files -z --cached --others --exclude-standard -- . ':!tests' |
    grep -zvxFf <(overlay_python) | LC_ALL=C sort -z | xargs -0 sha256sum 2>&1) || true
}

# build_byteps KEY: unpacks the wheel in build/python, where all environments find it.
build_byteps() {
  local wheels="$cache/wheels/$1" new="$cache/wheels/$1.$BASHPID"
  if ! compgen -G "$wheels/*.whl" >/dev/null; then
    # The build folder stays, so the next build compiles only changed files. Verbose output shows the compiler's
    # progress in the log.
    if ! PATH="$venv/bin:$PATH" "$venv/bin/python" -m pip --verbose wheel --no-deps \
      --no-build-isolation --disable-pip-version-check \
      --config-settings "build-dir=$root/build/cmake-byteps" --wheel-dir "$new" "$root" ||
      ! keep "$new" "$wheels"; then
      rm -rf "$new"
      return 1
    fi
  fi
  rm -rf "$package"
  "$uv" pip install --python "$venv/bin/python" --no-deps --target "$package" "$wheels"/*.whl
  stamp byteps "$1"
}

# link_python KEY: replaces the wheel's Python files by links to the checkout's. Patches and Megatron's overlay are read
# in the checkout, without a copy.
link_python() {
  local file name
  for name in hf ray rl; do
    rm -rf "$package/megatron_byteps_$name"
    ln -s "$root/integrations/$name/megatron_byteps_$name" "$package/"
  done
  rm -rf "$package/byteps/patching/data"
  (cd "$package" && find byteps -name '*.py' -o -name '*.pyi') | while read -r file; do
    # The wheel may be older than the overlay, and have files that the overlay no longer has.
    [[ -e $root/build/byteps/$file ]] || rm "$package/$file"
  done
  overlay_python | while read -r file; do
    mkdir -p "$(dirname "$package/$file")"
    ln -sf "$root/byteps/$file" "$package/$file"
  done
  PYTHONPATH="$package" "$venv/bin/python" -c 'import byteps.torch'
  stamp python "$1"
}

install_megatron() {
  "$uv" pip install --python "$venv/bin/python" --no-deps --no-build-isolation --reinstall \
    --editable "$root/build/Megatron-LM"
  # Upstream declares this extension optional, so a failed compilation would be silent without this check.
  "$venv/bin/python" -c 'import megatron.core.datasets.helpers_cpp'
  stamp megatron "$1"
}

# Only one setup may run at a time, because tests, training and a user may all start one.
exec 9>"$root/build/.setup.lock"
flock 9

step "system" setup_system
if ! find_uv "$root" "$cache" || ! python_works "$venv/bin/python"; then
  step "python and uv" setup_python
fi
find_uv "$root" "$cache"
python_works "$venv/bin/python" || step "environment" make_venv
# requirements_key GROUP: prints a hash of the group's packages and of Python.
requirements_key() {
  { "$venv/bin/python" -B "$root/scripts/locks.py" show "$1" && "$venv/bin/python" -VV; } | hash_of
}

key="$(requirements_key base)"
current requirements "$key" || step "requirements" install_requirements "$key" base

step "patches" "$root/scripts/apply_patches.sh"

# The key covers everything that can change the result of the build, and nothing else.
wheel_key="$({
  wheel_sources
  echo "$key $(uname -m) $("${CXX:-g++}" --version | head -n 1)"
  echo "$(type -p nvcc || true) $(missing_packages optional)"
  env | LC_ALL=C sort | grep -E '^(CC|CXX|CFLAGS|CXXFLAGS|LDFLAGS|CMAKE_.*|SKBUILD_.*|CUDA.*_HOME|BYTEPS_(WITH|BUILD)_.*)=' || true
} | hash_of)"
current byteps "$wheel_key" || step "byteps" build_byteps "$wheel_key"
python_key="$({ echo "$root $wheel_key" && overlay_python && declare -f link_python; } | hash_of)"
current python "$python_key" || step "byteps: Python" link_python "$python_key"

megatron_key="$({
  echo "$root $key"
  cd "$root/build/Megatron-LM"
  sha256sum setup.py pyproject.toml megatron/core/datasets/helpers.cpp
} | hash_of)"
current megatron "$megatron_key" || step "megatron" install_megatron "$megatron_key"

# link_packages KEY MODULES: links the packages in build/ and in this checkout (benchmarks, scripts, tests).
link_packages() {
  local site
  site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  # Megatron-LM is built already, so a line with its folder replaces an installation. The folder also has scripts that
  # ranks import, such as pretrain_dpu_gpt, and that are not in the package.
  printf '%s\n' "$package" "$root/build/Megatron-LM" "$root" >"$site/megatron-byteps.pth"
  ln -sf "$package/bin/byteps-server" "$venv/bin/"
  printf '#!%s\nimport sys\n\nfrom byteps.cli import main\n\nsys.exit(main())\n' "$venv/bin/python" \
    >"$venv/bin/megatron-byteps"
  chmod +x "$venv/bin/megatron-byteps"
  # These packages would override this project's: packages of verl, which it does not use, and an old installation of
  # byteps.
  rm -rf "$site"/{bench,scripts,tests} "$site"/{byteps,megatron_byteps}*
  "$venv/bin/python" -c "import $2"
  stamp links "$1"
}

# links_key KEY: prints the key of an environment with these requirements.
links_key() {
  echo "$root $1 $(declare -f link_packages | hash_of)"
}

links="$(links_key "$key")"
current links "$links" || step "links" link_packages "$links" "bench, scripts, tests, megatron_byteps_ray"

# extra NAME MODULES [VERSION]: makes build/venv-NAME with the dependency group NAME, for this version of Python.
extra() {
  local name="$1" extra_key links
  venv="$root/build/venv-$name"
  stamps="$venv/.megatron-byteps"
  python_works "$venv/bin/python" || step "$name: environment" make_venv "${@:3}"
  extra_key="$(requirements_key "$name")"
  current requirements "$extra_key" ||
    step "$name: packages" install_requirements "$extra_key" "$name"
  links="$(links_key "$extra_key")"
  current links "$links" || step "$name: links" link_packages "$links" "megatron.core.datasets.helpers_cpp, $2"
}

((with_ray == 0)) || extra ray "megatron_byteps_ray, ray"
((with_hf == 0)) || extra hf "megatron_byteps_hf, megatron_byteps_ray, transformers, ray" 3.12
((with_s3 == 0)) || extra s3 "megatron_byteps_ray, ray, multistorageclient, moto"
((with_rl == 0)) || extra rl "megatron_byteps_hf, megatron_byteps_ray, megatron_byteps_rl" 3.12
((with_frameworks == 0)) || extra frameworks "byteps, lightning, transformers"
