#!/usr/bin/env bash
# Shows a running cluster: its nodes, their traffic, and the last errors.
set -euo pipefail
# shellcheck source=scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

usage() {
  cat <<TEXT
Usage: $me [HOST:PORT] [options]

Asks the scheduler, which must have been started with --status-port (BYTEPS_STATUS_PORT), and prints
what it says. The same as a page: http://HOST:PORT/ in a browser.

  HOST:PORT          of the scheduler's page; [IPV6]:PORT for IPv6. Default: BYTEPS_HTTP_HOST
                     (127.0.0.1) and BYTEPS_STATUS_PORT
  --watch [SECONDS]  print it anew every so many seconds (default: 2), until Ctrl-C
  --json             print the JSON object instead of a table
  -h, --help         show this

A scheduler shows it to its own host alone unless --status-host says otherwise. From elsewhere, for
example: ssh -L 9001:127.0.0.1:9001 SCHEDULER-HOST, then $me 127.0.0.1:9001.

Exit status: 0 it was shown; 1 nobody answers, or not as a scheduler does; 2 bad use.

Example: $me 127.0.0.1:9001
TEXT
}

address=
watch=0
interval=2
path=/status.txt
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --watch)
      watch=1
      shift
      if (($#)) && [[ $1 =~ ^[0-9]+$ ]]; then
        need_integer "--watch" "$1" 1 3600
        interval=$1
        shift
      fi
      ;;
    --json) path=/status; shift ;;
    -*) die_usage "unknown setting: $1" ;;
    *) [[ -z $address ]] || die_usage "one address, not also '$1'"; address=$1; shift ;;
  esac
done
if [[ -z $address ]]; then
  host=${BYTEPS_HTTP_HOST:-127.0.0.1}
  [[ $host != 0.0.0.0 ]] || host=127.0.0.1
  need_integer "the port of the scheduler's page (HOST:PORT or BYTEPS_STATUS_PORT)" \
    "${BYTEPS_STATUS_PORT:-}" 1 65535
  port=$BYTEPS_STATUS_PORT
elif [[ $address =~ ^\[([0-9a-fA-F:.]+)\]:([0-9]{1,5})$ ||
  $address =~ ^([^:/[:space:]]+):([0-9]{1,5})$ ]]; then
  host=${BASH_REMATCH[1]}
  port=${BASH_REMATCH[2]}
else
  die_usage "'$address' is not HOST:PORT or [IPV6]:PORT"
fi
where=$(join_host_port "$host" "$port")

# ask prints the scheduler's answer without the HTTP header. It needs only bash.
ask() {
  timeout 10 bash -s -- "$host" "$port" "$path" "$where" 2>/dev/null <<'SCRIPT'
exec 3<>"/dev/tcp/$1/$2" || exit 1
printf 'GET %s HTTP/1.0\r\nHost: %s\r\nConnection: close\r\n\r\n' "$3" "$4" >&3
IFS= read -r line <&3 || exit 1
[[ $line == HTTP/1.?\ 200\ * ]] || exit 1
while IFS= read -r line <&3 && [[ $line != $'\r' ]]; do :; done
cat <&3
SCRIPT
}

# elsewhere prints another possible cause, unless the address is a loopback address.
elsewhere() {
  [[ $host == localhost || $host == 127.* || $host == ::1 ]] ||
    echo ", or without --status-host: then it shows it to its own machine alone" \
      "(ssh -L $port:127.0.0.1:$port $host, then $me 127.0.0.1:$port)"
}

while :; do
  if ! said=$(ask); then
    echo "$me: no scheduler shows its status at $where: the job has ended, or the scheduler" \
      "was started without --status-port$(elsewhere)" >&2
    exit 1
  fi
  if ((!watch)); then
    printf '%s\n' "$said"
    exit
  fi
  # On a terminal a new table replaces the last one. In a log it follows.
  if [[ -t 1 ]]; then printf '\033[H\033[2J'; fi
  date -u +%Y-%m-%dT%H:%M:%SZ
  printf '%s\n' "$said"
  sleep "$interval"
done
