# shellcheck shell=bash
# Functions for scripts that build and pack: Python, uv and system packages of this machine,
# sources of a library, and the cache. The scripts source this file.

# keep NEW KEPT: moves a complete folder to its name in the cache. Several setups may do this at the same time. A later
# one finds the folder of the first, which is as good, and leaves it in place.
keep() {
  mkdir -p "$(dirname "$2")"
  mv -T "$1" "$2" 2>/dev/null || { [[ -d $2 ]] && rm -rf "$1"; }
}

# ---- a Python that really runs
# A pyenv shim on PATH may exist and fail, so each candidate is run for its version instead of being trusted by name.

# python_works PYTHON: succeeds if PYTHON runs and is at least 3.12, which Megatron-LM needs.
python_works() {
  [[ -n "${1:-}" ]] && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' \
    >/dev/null 2>&1
}

# find_python: prints the first working Python of $PYTHON, PATH, pyenv's versions, uv's; or fails.
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
  # 3.12 comes first, because the lock file was resolved and tested with it.
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

# find_uv ROOT CACHE: sets `uv` to the uv on PATH, or to that of locks/bootstrap.lock in CACHE. Fails if there is none.
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

# use_uv CACHE: sets uv's folder of packages, and the certificates that uv trusts.
use_uv() {
  export UV_CACHE_DIR="${UV_CACHE_DIR:-$1/uv}"
  # uv brings a list of authorities. The system's list may also have local authorities.
  if [[ -s /etc/ssl/certs/ca-certificates.crt ]]; then
    export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}"
    export UV_NATIVE_TLS="${UV_NATIVE_TLS:-true}" # the older name
  fi
}

# install_ship_tools ROOT: makes ROOT/build/venv-ship from locks/ship.lock, unless it is
# current, and puts it on PATH.
install_ship_tools() {
  local root=$1 tools="$1/build/venv-ship" key uv
  local cache="${MEGATRON_BYTEPS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-byteps}"
  key=$(sha256sum <"$root/locks/ship.lock" | cut -c -64)
  if [[ ! -f $tools/.key || $(<"$tools/.key") != "$key" ]]; then
    echo "installing locks/ship.lock in build/venv-ship" >&2
    # make setup has installed uv there.
    find_uv "$root" "$cache" || { echo "error: no uv: run scripts/setup.sh" >&2; return 1; }
    use_uv "$cache"
    "$uv" venv --quiet --clear --python "$root/build/venv/bin/python" "$tools"
    "$uv" pip sync --quiet --python "$tools/bin/python" --require-hashes \
      "$root/locks/ship.lock"
    echo "$key" >"$tools/.key"
  fi
  PATH="$tools/bin:$PATH"
}

# ---- system packages that the build needs, and their installation where that is possible

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

# Cross-compilation for arm64, and emulation of the results.
[[ "$(uname -m)" != x86_64 ]] || system_needs+='
aarch64-linux-gnu-g++  g++-aarch64-linux-gnu optional
qemu-aarch64-static    qemu-user-static optional
'

# Packages of the RDMA tests, which run in a virtual machine (tests/rdma/vm), only on x86-64.
[[ "$(uname -m)" != x86_64 ]] || system_needs+='
qemu-system-x86_64     qemu-system-x86 optional
/bin/busybox           busybox-static optional
cpio                   cpio           optional
/sbin/depmod           kmod           optional
/etc/libibverbs.d/rxe.driver ibverbs-providers optional
ibv_devinfo            ibverbs-utils  optional
ib_write_bw            perftest       optional
'

# Packages that build and run images without a Docker engine (tests/images).
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

# A Slurm cluster on emulated hosts (tests/multiproc/test_slurm.py).
slurm_needs='
/usr/sbin/slurmctld    slurmctld      required
/usr/sbin/slurmd       slurmd         required
srun                   slurm-client   required
/usr/sbin/munged       munge          required
'

# Thorough tests of memory (tests/unit/test_parts.py).
valgrind_needs='
valgrind               valgrind       required
'

has_header() {
  echo "#include <$1>" | g++ -E -x c++ - >/dev/null 2>&1
}

# missing_packages required|optional: prints the packages whose test fails, one per line.
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

# as_root: prints the prefix that runs a command as root (possibly empty), or fails.
as_root() {
  if [[ "$(id -u)" == 0 ]]; then
    return 0
  fi
  command -v sudo >/dev/null 2>&1 && sudo -n true >/dev/null 2>&1 && echo sudo
}

# apt_install PACKAGE...: installs the packages; fails without apt-get or the right to use it.
apt_install() {
  local prefix
  command -v apt-get >/dev/null 2>&1 && prefix="$(as_root)" || return 1
  # shellcheck disable=SC2086 # the prefix is empty or one word
  $prefix env DEBIAN_FRONTEND=noninteractive apt-get update -qq </dev/null &&
    $prefix env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      "$@" </dev/null
}

# setup_system: installs missing packages; only a missing required package is a failure.
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

# setup_more NEEDS: installs the packages of this table, and fails without them.
setup_more() {
  local system_needs="$1"
  local -a missing
  mapfile -t missing < <(missing_packages required)
  ((${#missing[@]} > 0)) || return 0
  echo "setup: installing ${missing[*]}"
  # RUNLEVEL keeps apt from starting the packages' services.
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

# ---- the sources of libsodium, which is compiled into the shipped files
# Signed source packages of the distribution have them, so no URL is needed here.

distribution() { (. /etc/os-release && echo "$ID-$VERSION_ID"); }

# sodium_source CACHE: prints the folder of libsodium's sources. After an update of the machine's package, the sources
# are fetched again.
sodium_source() {
  local version
  version=$(dpkg-query --show --showformat '${Version}' libsodium-dev 2>/dev/null) || version=unknown
  echo "$1/libsodium-$(distribution)-$version"
}

fetch_sodium_source() { fetch_sources "$1" libsodium; }

# fetch_sources FOLDER PACKAGE...: makes FOLDER with PACKAGE-VERSION/ for each, with the distribution's own patches, and
# `versions`, a line for each: package, version, distribution. Does nothing if FOLDER exists.
fetch_sources() {
  local folder=$1 work archive package patch status
  [[ -d $folder ]] && return 0
  shift
  command -v apt-get >/dev/null 2>&1 || {
    echo "error: the sources of $* come from Debian's or Ubuntu's archive, and there" \
      "is no apt-get here" >&2
    return 1
  }
  work=$(mktemp -d "$(dirname "$folder")/sources.XXXXXX")
  # Not `( ) || status=1`: there bash would ignore the failures inside.
  set +e
  (
    set -e
    mkdir -p "$work"/{lists/partial,cache/archives/partial,parts,tree}
    # The sources come from the archives of the packages. The system's own list is unchanged.
    { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true; } |
      sed -n 's/^deb /deb-src /p' >"$work/parts/all.list"
    for archive in /etc/apt/sources.list.d/*.sources; do
      [[ -e $archive ]] || continue
      sed 's/^Types:.*/Types: deb-src/' "$archive" >"$work/parts/${archive##*/}"
    done
    apt=(apt-get -qq -o "Dir::Etc::sourcelist=/dev/null" -o "Dir::Etc::sourceparts=$work/parts"
      -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o "APT::Sandbox::User=root")
    "${apt[@]}" update
    cd "$work/tree"
    "${apt[@]}" source --download-only "$@"
    for archive in *.orig.tar.*; do tar -xf "$archive"; done
    # dfsg and similar suffixes mark a repacked archive, not another version.
    for archive in */; do
      [[ $archive == *+* ]] && mv "$archive" "${archive%%+*}"
    done
    for package; do
      cd "$work/tree/$(echo "$package"-*)"
      archive=$(echo ../"$package"_*.dsc)
      echo "$package $(sed -n 's/^Version: //p' "$archive" | head -n 1) $(distribution)" >>../versions
      tar -xf ../"$package"_*.debian.tar.*
      [[ -e debian/patches/series ]] || continue
      # git apply must not see a repository around the cache.
      while read -r patch; do
        GIT_CEILING_DIRECTORIES=$work/tree git apply "debian/patches/$patch"
      done < <(sed -E 's/#.*//; /^ *$/d' debian/patches/series)
    done
    cd "$work/tree"
    rm -f -- *.dsc *.tar.*
  )
  status=$?
  set -e
  ((status != 0)) || keep "$work/tree" "$folder" || status=1
  rm -rf "$work"
  ((status == 0)) || echo "error: could not fetch the sources of $*" >&2
  return "$status"
}
