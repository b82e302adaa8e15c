# shellcheck shell=bash
# Sourced: which system packages the build needs, and their installation where that is possible.

# Each line: a test (a command, a header if it ends in .h, or a file's path), Debian's package, need.
system_needs='
g++                    g++            required
git                    git            required
pkg-config             pkg-config     required
infiniband/verbs.h     libibverbs-dev optional
rdma/rdma_cma.h        librdmacm-dev  optional
ip                     iproute2       optional
sodium.h               libsodium-dev  required
gtest/gtest.h          libgtest-dev   optional
openssl                openssl        optional
ccache                 ccache         optional
'

# Cross-compiling for arm64, and running what comes out.
[[ "$(uname -m)" != x86_64 ]] || system_needs+='
aarch64-linux-gnu-g++  g++-aarch64-linux-gnu optional
qemu-aarch64-static    qemu-user-static optional
'

# What only the RDMA tests need, which run in a virtual machine (tests/rdma/vm), on x86-64 alone.
[[ "$(uname -m)" != x86_64 ]] || system_needs+='
qemu-system-x86_64     qemu-system-x86 optional
/bin/busybox           busybox-static optional
cpio                   cpio           optional
/sbin/depmod           kmod           optional
/etc/libibverbs.d/rxe.driver ibverbs-providers optional
ibv_devinfo            ibverbs-utils  optional
ib_write_bw            perftest       optional
'

# What building and running images without a Docker engine needs (tests/images).
image_needs='
buildah                buildah        required
mmdebstrap             mmdebstrap     required
arch-test              arch-test      required
qemu-aarch64-static    qemu-user-static required
podman                 podman         required
crun                   crun           required
/usr/lib/podman/netavark netavark     required
/usr/lib/podman/aardvark-dns aardvark-dns required
iptables               iptables       required
'

# A Slurm cluster on emulated hosts (tests/multiproc/slurm.py).
slurm_needs='
/usr/sbin/slurmctld    slurmctld      required
/usr/sbin/slurmd       slurmd         required
srun                   slurm-client   required
/usr/sbin/munged       munge          required
'

# Thorough tests of memory (tests/unit/test_valgrind.py).
valgrind_needs='
valgrind               valgrind       required
'

has_header() {
  echo "#include <$1>" | g++ -E -x c++ - >/dev/null 2>&1
}

# missing_packages required|optional: prints the packages whose test fails, one a line.
missing_packages() {
  local test package need
  while read -r test package need; do
    [[ "$need" == "$1" ]] || continue
    case "$test" in
      /*) [[ -e "$test" ]] || echo "$package" ;;
      *.h) has_header "$test" || echo "$package" ;;
      *) command -v "$test" >/dev/null 2>&1 || echo "$package" ;;
    esac
  done <<<"$system_needs"
}

# as_root: prints the prefix that runs a command as root (maybe nothing), or fails.
as_root() {
  if [[ "$(id -u)" == 0 ]]; then
    return 0
  fi
  command -v sudo >/dev/null 2>&1 && sudo -n true >/dev/null 2>&1 && echo sudo
}

# apt_install PACKAGE...: installs what it can; fails where there is no apt-get or no right to it.
apt_install() {
  local prefix
  command -v apt-get >/dev/null 2>&1 && prefix="$(as_root)" || return 1
  # shellcheck disable=SC2086 # the prefix is empty or one word
  $prefix env DEBIAN_FRONTEND=noninteractive apt-get update -qq </dev/null &&
    $prefix env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      "$@" </dev/null
}

# setup_system: installs what is missing; only a missing required package is a failure.
setup_system() {
  local -a required optional
  mapfile -t required < <(missing_packages required)
  mapfile -t optional < <(missing_packages optional)
  if ((${#required[@]} + ${#optional[@]} > 0)); then
    apt_install "${required[@]}" "${optional[@]}" || true
    mapfile -t required < <(missing_packages required)
    mapfile -t optional < <(missing_packages optional)
  fi
  if ((${#optional[@]} > 0)); then
    echo "note: without ${optional[*]} (Debian's names) the parts that need them are left out" >&2
  fi
  if ((${#required[@]} > 0)); then
    echo "error: please install (Debian's names): ${required[*]}" >&2
    return 1
  fi
}

# setup_more NEEDS: installs what this table names, and fails without it.
setup_more() {
  local system_needs="$1"
  local -a missing
  mapfile -t missing < <(missing_packages required)
  ((${#missing[@]} > 0)) || return 0
  echo "setup: installing ${missing[*]}"
  # RUNLEVEL: no service of theirs is started.
  RUNLEVEL=1 apt_install "${missing[@]}" >/dev/null || true
  mapfile -t missing < <(missing_packages required)
  if ((${#missing[@]} > 0)); then
    echo "error: please install (Debian's names): ${missing[*]}" >&2
    return 1
  fi
}

setup_images() { setup_more "$image_needs"; }
setup_slurm() { setup_more "$slurm_needs"; }
setup_valgrind() { setup_more "$valgrind_needs"; }
