#!/usr/bin/env bash
# Runs a job's own launch line for a few steps plain and through servers, and says which to keep.
set -euo pipefail
# shellcheck source=scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

usage() {
  cat <<TEXT
Usage: try.sh [options] -- COMMAND

The same as 'megatron-byteps try' with the Python that has byteps. Run it on every host on which
COMMAND would be started. 'try.sh --options' shows the options.
TEXT
}

case ${1:-} in
  -h | --help) usage; exit 0 ;;
  --options) set -- --help ;;
esac
python=$(find_python)
exec "$python" -m byteps.trial "$@"
