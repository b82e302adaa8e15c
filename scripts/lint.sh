#!/usr/bin/env bash
# Runs every linter, even after a failure, and reports which failed.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

usage() {
  cat <<'TEXT'
usage: scripts/lint.sh [--fix]

Checks Python (ruff, mypy, import-linter), the first words of comments, shell scripts (shellcheck), the C++ files
of overlays, benchmarks and tests (clang-format), the container files (hadolint), the Kubernetes manifests (against
its schemas), their versions against docker/versions.env, and the patch series. What has not changed since it passed
is not looked at again (build/lint). --fix rewrites what can be rewritten first.
Needs build/venv: run scripts/setup.sh before.
TEXT
}

fix=0
case "${1:-}" in
  "") ;;
  --fix) fix=1 ;;
  -h | --help)
    usage
    exit 0
    ;;
  *)
    usage >&2
    exit 2
    ;;
esac

cd "$root"
bin="$root/build/venv/bin"
mapfile -t shell < <(find . \( -path ./build -o -path ./.git \) -prune -o \( -name '*.sh' -o -name '*.sbatch' \) -print)
shell+=(.ci/run)
mapfile -t cpp < <(find bench byteps Megatron-LM tests -type f \
  \( -name '*.h' -o -name '*.hpp' -o -name '*.cc' -o -name '*.cpp' -o -name '*.cu' \) 2>/dev/null)

if ((fix)); then
  "$bin/ruff" check --quiet --fix . || true
  "$bin/ruff" format --quiet .
  ((${#cpp[@]} == 0)) || "$bin/clang-format" -i "${cpp[@]}"
fi

names=()
jobs=()
outputs="$(mktemp -d)"
trap 'rm -rf "$outputs"' EXIT
# run NAME COMMAND...: starts a linter; `report` prints its output only if it failed.
run() {
  names+=("$1")
  shift
  "$@" >"$outputs/${#jobs[@]}" 2>&1 &
  jobs+=($!)
}

# changed NAME FILE... -- COMMAND...: like run, but skips files with which it has passed before. For tools without a
# cache of their own.
changed() {
  local name=$1 files=() state kept
  shift
  while [[ $1 != -- ]]; do
    files+=("$1")
    shift
  done
  shift
  kept="$root/build/lint/${name%% *}"
  state=$({ echo "$*" && sha256sum scripts/lint.sh locks/base.lock "${files[@]}"; } | sha256sum)
  if [[ -f $kept && $(<"$kept") == "$state" ]]; then
    echo "lint: $name: ok, as before"
    return
  fi
  run "$name" passes "$kept" "$state" "$@"
}
# passes FILE STATE COMMAND...: runs it, and writes STATE to FILE if it succeeds.
passes() {
  "${@:3}" && mkdir -p "${1%/*}" && echo "$2" >"$1"
}

failed=()
report() {
  local index
  for index in "${!names[@]}"; do
    if wait "${jobs[index]}"; then
      echo "lint: ${names[index]}: ok"
    else
      echo "lint: ${names[index]}: FAILED"
      cat "$outputs/$index"
      failed+=("${names[index]}")
    fi
  done
}

run "ruff check" "$bin/ruff" check .
run "ruff format" "$bin/ruff" format --check --diff .
run "mypy" "$bin/mypy"
run "imports" "$bin/lint-imports" --no-cache --no-logo
run "comments" "$bin/python" scripts/comments.py
changed "shellcheck (${#shell[@]} files)" "${shell[@]}" -- "$bin/shellcheck" -x "${shell[@]}"
changed "clang-format (${#cpp[@]} files)" .clang-format "${cpp[@]}" -- \
  "$bin/clang-format" --dry-run -Werror "${cpp[@]}"
# check_versions: images use only the versions in docker/versions.env.
check_versions() {
  local name value status=0
  while IFS='=' read -r name value; do
    [[ $name == *_IMAGE ]] || continue
    if ! grep -qx "ARG $name=$value" docker/*.Dockerfile; then
      echo "no Dockerfile says ARG $name=$value"
      status=1
    fi
  done <docker/versions.env
  value=$(sed -n 's/^IMAGE_TAG=//p' docker/versions.env)
  if grep -nE '^ *image: ' docker/kubernetes/*.yaml deploy/kubernetes/*.yaml | grep -v ":$value\$"; then
    echo "IMAGE_TAG is $value"
    status=1
  fi
  name=$(sed -n 's/^version = "\([^"]*\)".*/\1/p' pyproject.toml | head -n 1)
  if [[ $value != "$name" ]]; then
    echo "IMAGE_TAG is $value, and pyproject.toml has version $name"
    status=1
  fi
  return "$status"
}

changed "hadolint" docker/*.Dockerfile -- "$bin/hadolint" docker/*.Dockerfile
changed "kubernetes" docker/kubernetes/byteps.yaml -- \
  "$bin/kubernetes-validate" --strict --quiet -k 1.33 docker/kubernetes/byteps.yaml
run "image versions" check_versions
mapfile -t series < <(find patches byteps/byteps/patching scripts/patchkit scripts/patchset.py upstream.lock -type f ! -name '*.pyc')
# Patches do not touch files of the overlay, so only its file names matter.
changed "patches" "${series[@]}" <(find byteps Megatron-LM -type f ! -name '*.pyc' | LC_ALL=C sort) -- \
  "$root/scripts/apply_patches.sh" --check
report

if ((${#failed[@]} > 0)); then
  echo "lint: failed: ${failed[*]}" >&2
  exit 1
fi
