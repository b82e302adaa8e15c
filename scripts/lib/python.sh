# shellcheck shell=bash
# Sourced: finds a Python that really runs. A pyenv shim on PATH may exist and fail, so each
# candidate is asked for its version instead of being trusted by name.

# python_works PYTHON: whether PYTHON runs and is at least 3.12, which Megatron-LM needs.
python_works() {
  [[ -n "${1:-}" ]] && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' \
    >/dev/null 2>&1
}

# find_python: prints the first working one of $PYTHON, PATH, pyenv's versions, uv's; or fails.
find_python() {
  local candidate pyenv uv
  if [[ -n "${PYTHON:-}" ]]; then
    if python_works "$PYTHON"; then
      command -v "$PYTHON"
      return 0
    fi
    echo "error: PYTHON=$PYTHON is not a Python >= 3.12 that runs" >&2
    return 1
  fi
  # 3.12 first: the lock file was resolved and tested with it.
  for candidate in python3.12 python3.13 python3.14 python3; do
    if command -v "$candidate" >/dev/null 2>&1 && python_works "$candidate"; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return 0
    fi
  done
  pyenv="${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}"
  for candidate in "$pyenv"/versions/3.12*/bin/python3.12 "$pyenv"/versions/3.1[3-9]*/bin/python3; do
    if [[ -x "$candidate" ]] && python_works "$candidate"; then
      echo "$candidate"
      return 0
    fi
  done
  uv="$(command -v uv || true)"
  if [[ -n "$uv" ]] && candidate="$("$uv" python find '>=3.12' 2>/dev/null)" &&
    python_works "$candidate"; then
    echo "$candidate"
    return 0
  fi
  return 1
}

# find_uv ROOT CACHE: sets `uv`, the one on PATH or that of locks/bootstrap.lock in CACHE; or fails.
find_uv() {
  local key
  if command -v uv >/dev/null 2>&1; then
    uv="$(command -v uv)"
  else
    key="$(sha256sum <"$1/locks/bootstrap.lock" | cut -c -16)"
    uv="$2/uv-$key/bin/uv"
  fi
  [[ -x "$uv" ]]
}

# use_uv CACHE: where uv keeps packages, and whom it trusts.
use_uv() {
  export UV_CACHE_DIR="${UV_CACHE_DIR:-$1/uv}"
  # uv brings its own list of authorities; where the system has one, it knows the local ones as well.
  if [[ -s /etc/ssl/certs/ca-certificates.crt ]]; then
    export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}"
    export UV_NATIVE_TLS="${UV_NATIVE_TLS:-true}" # the older name
  fi
}
