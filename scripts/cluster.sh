#!/usr/bin/env bash
# Starts, shows and ends a whole job on a list of hosts, over ssh.
set -euo pipefail
# shellcheck source=scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

usage() {
  cat <<TEXT
Usage: cluster.sh up HOSTS [options] -- SCRIPT [ARGUMENTS]
       cluster.sh status | logs | down HOSTS [options]

Runs a job on hosts that ssh reaches without a password. The file HOSTS has a line for each:

  scheduler 10.0.0.1
  server    10.0.0.2
  server    10.0.0.3 2        # two server processes
  spare     10.0.0.4          # takes the place of a server that is lost
  worker    10.0.0.10         # the first worker's host is torchrun's master
  worker    10.0.0.11

A host may be an address, a name, or user@name; the name must be one at which the others reach it.

  up      starts scheduler, servers and workers, in this order; nothing keeps running here
  status  says of each whether it runs, and how it ended; and what the scheduler knows of them
          (status.sh)
  logs    prints the end of each log, every line with its role and host
  down    ends them all, workers first, and removes what they left on the hosts

  --checkout DIR        where this project lies on the hosts (default: where it lies here)
  --port PORT           the scheduler's port (default: 9000)
  --status-port PORT    where the scheduler shows the cluster to its own host (default: the
                        scheduler's port + 1)
  --master-port PORT    torchrun's port (default: 29500)
  --nproc-per-node N    ranks on each worker's host (default: 1)
  --tls                 encrypt what the processes say to each other (BYTEPS_TLS=1); where
                        BYTEPS_TLS_CERT, _KEY and _CA are set, by those files of each host
  --max-restarts N      when a worker fails, torchrun starts all of them again, up to N times;
                        scheduler and servers outlive that (--keep) (default: 0)
  --name NAME           the job's name, one for each at a time (default: that of the file)
  --lines N             lines of each log (default: 20)
  --dry-run             print what would be run, and where, and do nothing
  -h, --help            show this

"up" makes a secret for the job and hands it to each host, unless BYTEPS_SECRET_FILE or
BYTEPS_SECRET is set here; with BYTEPS_AUTH=0 the job goes without.

CLUSTER_SSH (default: ssh -o BatchMode=yes -o ConnectTimeout=10) is what reaches a host: it is given
the host and a command, like ssh.

Exit status: 0 all went well; 1 something failed on a host, or (status) does not run; 2 bad use.
TEXT
}

(($#)) || die_usage "missing: up, status, logs or down"
action=$1
shift
case $action in
  -h | --help) usage; exit 0 ;;
  up | status | logs | down) ;;
  *) die_usage "'$action' is none of up, status, logs, down" ;;
esac

hosts_file=
checkout=$repo_root
port=9000
status_port=
master_port=29500
nproc=1
name=
lines=20
restarts=0
dry_run=0
tls=${BYTEPS_TLS:-0}
script=()
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --checkout) need_argument "$1" "$@"; checkout=$2; shift 2 ;;
    --port) need_argument "$1" "$@"; port=$2; shift 2 ;;
    --status-port) need_argument "$1" "$@"; status_port=$2; shift 2 ;;
    --master-port) need_argument "$1" "$@"; master_port=$2; shift 2 ;;
    --nproc-per-node) need_argument "$1" "$@"; nproc=$2; shift 2 ;;
    --max-restarts) need_argument "$1" "$@"; restarts=$2; shift 2 ;;
    --name) need_argument "$1" "$@"; name=$2; shift 2 ;;
    --lines) need_argument "$1" "$@"; lines=$2; shift 2 ;;
    --tls) tls=1; shift ;;
    --dry-run) dry_run=1; shift ;;
    --) shift; script=("$@"); break ;;
    -*) die_usage "unknown setting: $1 (the script and its arguments stand after --)" ;;
    *) [[ -z $hosts_file ]] || die_usage "one file of hosts, not also '$1'"; hosts_file=$1; shift ;;
  esac
done
[[ -n $hosts_file ]] || die_usage "missing: the file of hosts"
[[ -r $hosts_file ]] || die_usage "cannot read the file of hosts '$hosts_file'"
need_integer "--port" "$port" 1 65535
status_port=${status_port:-$((10#$port % 65535 + 1))}
need_integer "--status-port" "$status_port" 1 65535
need_integer "--master-port" "$master_port" 1 65535
need_integer "--nproc-per-node" "$nproc" 1 1024
need_integer "--max-restarts" "$restarts" 0 1000
need_integer "--lines" "$lines" 1 100000
[[ $action != up ]] || ((${#script[@]})) || die_usage "missing: -- SCRIPT"
[[ $action == up ]] || ((!${#script[@]})) || die_usage "'$action' takes no script"
if [[ -z $name ]]; then
  name=${hosts_file##*/}
  name=${name%.*}
fi
[[ $name =~ ^[A-Za-z0-9_.-]+$ ]] || die_usage "the job's name '$name' has other than letters, digits, _ . -"
read -ra reach <<<"${CLUSTER_SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10}"

# The job's secret: the caller's, or a new secret.
secret=
if [[ $action == up && ${BYTEPS_AUTH:-} != 0 ]]; then
  if [[ -n ${BYTEPS_SECRET_FILE:-} ]]; then
    [[ -r $BYTEPS_SECRET_FILE ]] || die_usage "cannot read BYTEPS_SECRET_FILE=$BYTEPS_SECRET_FILE"
    secret=$(<"$BYTEPS_SECRET_FILE")
  else
    secret=${BYTEPS_SECRET:-$(od -An -N 32 -t x8 /dev/urandom | tr -d ' \n')}
  fi
fi

# One entry per process: role, host, and number of servers.
roles=()
hosts=()
counts=()
number=0
while read -r role host count rest; do
  number=$((number + 1))
  [[ -n $role && $role != \#* ]] || continue
  [[ ! ${count:-} == \#* ]] || { count=''; rest=''; }
  [[ ! ${rest:-} == \#* ]] || rest=''
  case $role in
    scheduler | server | spare | worker) ;;
    *) die_usage "$hosts_file, line $number: '$role' is none of scheduler, server, spare, worker" ;;
  esac
  [[ -n $host && -z $rest ]] || die_usage "$hosts_file, line $number: not ROLE HOST [NUMBER]"
  [[ -z $count || $role == server ]] || die_usage "$hosts_file, line $number: only servers have a number"
  need_integer "$hosts_file, line $number: the number of servers" "${count:-1}" 1 1024
  roles+=("$role")
  hosts+=("$host")
  counts+=("${count:-1}")
done <"$hosts_file"

# Prints the indices of a role's entries.
of() {
  local i
  for i in "${!roles[@]}"; do [[ ${roles[i]} != "$1" ]] || echo "$i"; done
}
mapfile -t schedulers < <(of scheduler)
mapfile -t server_entries < <(of server)
mapfile -t spares < <(of spare)
mapfile -t workers < <(of worker)
((${#schedulers[@]} == 1)) || die_usage "$hosts_file has ${#schedulers[@]} schedulers, not one"
((${#server_entries[@]})) || die_usage "$hosts_file has no server"
((${#workers[@]})) || die_usage "$hosts_file has no worker"
servers=0
for i in "${server_entries[@]}"; do servers=$((servers + 10#${counts[i]})); done
ranks=$((${#workers[@]} * 10#$nproc))
address=${hosts[${schedulers[0]}]##*@}
master=${hosts[${workers[0]}]##*@}

# on_host ACTION JOB PROCESS ARGUMENT...: this function is sent to each host and run there. Each process of a job has a
# folder there, with its log and its pid (the leader of its process group). `secret` is the job's; empty: none.
# shellcheck disable=SC2329 # it is sent as text
on_host() {
  action=$1 job=/tmp/megatron-byteps-$(id -u)-$2 folder=/tmp/megatron-byteps-$(id -u)-$2/$3
  shift 3

  # alive: succeeds if the group still has a process. The pid may have been reused, so the name of the folder in the
  # processes' environment identifies them.
  alive() {
    [[ -s $folder/pid ]] || return 1
    pid=$(<"$folder/pid")
    tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -qxF "MEGATRON_BYTEPS_RUN=$folder"
  }

  case $action in
    up)
      # up JOB PROCESS CHECKOUT COMMAND...
      checkout=$1
      shift
      if alive; then
        echo "runs already (pid $pid): take it down first"
        exit 1
      fi
      cd "$checkout"
      rm -rf "$folder"
      mkdir -m 700 "$job" 2>/dev/null || [[ -O $job && ! -L $job ]] || {
        echo "$job is somebody else's"
        exit 1
      }
      mkdir "$folder"
      unset BYTEPS_SECRET
      if [[ -n $secret ]]; then
        (umask 077 && echo "$secret" >"$folder/secret")
        export BYTEPS_SECRET_FILE=$folder/secret
      else
        export BYTEPS_AUTH=0
      fi
      MEGATRON_BYTEPS_RUN=$folder setsid "$@" >"$folder/log" 2>&1 </dev/null &
      echo $! >"$folder/pid"
      printf '%s\n' "$PWD" "$@" >"$folder/command" # The checkout, then the command, one word per line.
      echo "started (pid $!)"
      ;;
    status)
      if alive; then
        echo "running (pid $pid)"
      elif [[ -d $folder ]]; then
        echo "ended: $(tail -n 1 "$folder/log" 2>/dev/null)"
      else
        echo "not started"
        exit 1
      fi
      ;;
    table)
      # table JOB PROCESS: shows the status of the cluster, from the scheduler on this host
      alive || exit 0
      port=$(grep -xF -A 1 -e --status-port "$folder/command" | tail -n 1)
      "$(head -n 1 "$folder/command")/scripts/status.sh" "127.0.0.1:$port"
      ;;
    logs)
      # logs JOB PROCESS LINES
      [[ ! -e $folder/log ]] || tail -n "$1" "$folder/log"
      ;;
    down)
      # down JOB PROCESS SECONDS
      if alive; then
        kill -TERM -- "-$pid" 2>/dev/null || true
        for ((i = 0; i < $1 * 10; i++)); do
          alive || break
          sleep 0.1
        done
        kill -KILL -- "-$pid" 2>/dev/null || true
      fi
      rm -rf "$folder"
      rmdir "$job" 2>/dev/null || true # Not empty if another process of the job is on this host.
      echo "down"
      ;;
  esac
}

# remote INDEX ACTION ARGUMENT...: runs on_host on the host of that entry.
remote() {
  local i=$1 what=$2
  shift 2
  local quoted
  printf -v quoted '%q ' bash -s -- "$what" "$name" "$i-${roles[i]}" "$@"
  # The secret is sent through stdin, because arguments are visible to everybody on the host.
  { printf 'set -euo pipefail\nsecret=%q\n' "$secret" && declare -f on_host && echo 'on_host "$@"'; } |
    "${reach[@]}" "${hosts[i]}" "$quoted" 2>&1
}

# Environment variables of every process of the job.
environment=()
if [[ $tls != 0 ]]; then
  environment=("BYTEPS_TLS=$tls")
  for variable in BYTEPS_TLS_CERT BYTEPS_TLS_KEY BYTEPS_TLS_CA; do
    [[ -z ${!variable:-} ]] || environment+=("$variable=${!variable}")
  done
fi
if ((${#spares[@]})); then
  environment+=("BYTEPS_REPLACE_SERVERS_S=${BYTEPS_REPLACE_SERVERS_S:-60}")
fi

keep=()
again=()
if ((10#$restarts)); then
  keep=(--keep)
  again=(--max-restarts "$restarts")
fi

# command_of INDEX sets the array `command` to the entry's command.
command_of() {
  local i=$1 rank
  case ${roles[i]} in
    scheduler)
      command=(scripts/scheduler.sh --host "$address" --port "$port" --workers "$ranks"
        --servers "$servers" --status-port "$status_port" ${keep[@]+"${keep[@]}"}) ;;
    server | spare)
      command=(scripts/server.sh --scheduler "$(join_host_port "$address" "$port")"
        --workers "$ranks" --servers "$servers" --instances "${counts[i]}"
        --node-host "${hosts[i]##*@}" ${keep[@]+"${keep[@]}"}) ;;
    worker)
      for rank in "${!workers[@]}"; do [[ ${workers[rank]} != "$i" ]] || break; done
      command=(scripts/worker.sh --scheduler "$(join_host_port "$address" "$port")"
        --servers "$servers" --nnodes "${#workers[@]}" --node-rank "$rank"
        --nproc-per-node "$nproc" --master-addr "$master" --master-port "$master_port"
        --node-host "${hosts[i]##*@}" ${again[@]+"${again[@]}"} -- "${script[@]}") ;;
  esac
  ((${#environment[@]} == 0)) || command=(env "${environment[@]}" "${command[@]}")
}

case $action in
  up) order=("${schedulers[@]}" "${server_entries[@]}" ${spares[@]+"${spares[@]}"} "${workers[@]}") ;;
  down) order=("${workers[@]}" ${spares[@]+"${spares[@]}"} "${server_entries[@]}" "${schedulers[@]}") ;;
  *) order=("${!roles[@]}") ;;
esac

failed=0
started=()
for i in "${order[@]}"; do
  label="${roles[i]} ${hosts[i]}"
  arguments=()
  case $action in
    up)
      command_of "$i"
      if ((dry_run)); then
        printf '%s:' "$label"
        printf ' %q' "${command[@]}"
        echo
        continue
      fi
      arguments=("$checkout" "${command[@]}")
      ;;
    logs) arguments=("$lines") ;;
    down) arguments=(20) ;;
  esac
  status=0
  said=$(remote "$i" "$action" "${arguments[@]}") || status=$?
  while IFS= read -r line; do echo "$label: $line"; done <<<"${said:-(nothing)}"
  if ((status == 0)); then
    started+=("$i")
    continue
  fi
  failed=1
  if [[ $action == up ]]; then
    echo "cluster.sh: could not start $label; ending what was started" >&2
    for other in ${started[@]+"${started[@]}"}; do remote "$other" down 5 >/dev/null || true; done
    exit 1
  fi
done
if [[ $action == status ]]; then
  echo
  remote "${schedulers[0]}" table || true # The scheduler may be starting, or have just ended.
fi
exit "$failed"
