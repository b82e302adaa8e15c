# shellcheck shell=bash
# Sourced by scripts that take no arguments.

# no_arguments USAGE "$@": answers -h with USAGE and exits; exits with 2 for anything else.
no_arguments() {
  local usage=$1
  shift
  case "$*" in
    "") return 0 ;;
    -h | --help)
      echo "$usage"
      exit 0
      ;;
  esac
  echo "error: ${0##*/} takes no arguments, got: $*" >&2
  echo "$usage" >&2
  exit 2
}
