#!/usr/bin/env bash
# Collects the files for benchmarks on a machine without network access; see usage below.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$root/build/bundle"

usage() {
  cat <<'TEXT'
usage: scripts/bundle.sh [-h] [--with PARTS] [FOLDER]

Collects in one folder (default: build/bundle; it is made anew) what benchmarks and training need
in addition to this checkout, Python, PyTorch, NumPy and a C++ compiler: the byteps package and
byteps-server, the patched Megatron-LM and the small packages that it imports, the programs that make
emulated links (ip, tc, sysctl), and the shared libraries of all of these but those of the C and C++
compilers' run time. About 25 MB.

Copy the checkout and the folder to a machine of the same architecture and Python version, whose C
library is as new as this one's, and use them there:

  cd CHECKOUT
  . FOLDER/activate
  python3 bench/pushpull_bench.py --workers 4 --servers 4 --emulate 8@10gbit --sizes 256MiB
  python3 bench/train_bench.py --tree FOLDER/Megatron-LM --workers 2 --servers 1

  --with PARTS  also what these need: "ray" (docs/use/ray.md), "hf" (docs/use/huggingface.md), "rl"
                (docs/use/rl.md; it brings the other two along), or several of them. Packages are
                compressed then, into one file that `activate` unpacks when it is first used: about
                50 MB in all. The last line names what the machine needs with PyTorch

Run `make setup` first, with --with also `scripts/setup.sh --ray`, `--hf` or `--rl`.
TEXT
}

with=()
given=()
while (($# > 0)); do
  case "$1" in
    -h | --help)
      usage
      exit 0
      ;;
    --with)
      (($# > 1)) || { echo 'error: --with needs parts: "ray", "hf", "rl"' >&2; exit 2; }
      read -ra with <<<"$2"
      shift
      ;;
    -*)
      echo "error: bundle.sh has no option $1" >&2
      usage >&2
      exit 2
      ;;
    *) given+=("$1") ;;
  esac
  shift
done
if ((${#given[@]} > 1)); then
  echo "error: bundle.sh takes one folder, got: ${given[*]}" >&2
  usage >&2
  exit 2
fi
folder="${given[0]:-$folder}"
for name in "${with[@]}"; do
  if [[ $name != ray && $name != hf && $name != rl ]]; then
    echo "error: --with takes \"ray\", \"hf\", \"rl\" or several of them, not $name" >&2
    exit 2
  fi
done

fail() {
  echo "error: $*" >&2
  exit 1
}

python="$root/build/venv/bin/python"
[[ -x $python && -x $root/build/venv/bin/byteps-server ]] || fail "there is no build: run make setup"
# build/venv-hf also has Ray, and build/venv-rl has everything.
extra=""
if ((${#with[@]} > 0)); then
  extra="$root/build/venv-ray/bin/python"
  if [[ " ${with[*]} " == *" hf "* ]]; then extra="$root/build/venv-hf/bin/python"; fi
  if [[ " ${with[*]} " == *" rl "* ]]; then extra="$root/build/venv-rl/bin/python"; fi
  [[ -x $extra ]] || fail "$extra is missing: run scripts/setup.sh ${with[*]/#/--}"
fi
# Hydra needs another version of omegaconf, so all packages must come from one lock.
packages="$("${extra:-$python}" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"

# Only an earlier bundle is overwritten.
if [[ -e $folder && ! -e $folder/activate ]] && [[ -n "$(ls -A "$folder")" ]]; then
  fail "$folder is not empty, and no bundle: name another folder"
fi
part="$(mktemp -d "${TMPDIR:-/tmp}/bundle.XXXXXX")"
trap 'rm -rf "$part"' EXIT
mkdir -p "$part/bin" "$part/lib" "$part/python" "$part/Megatron-LM"

# ---------------------------------------------------------------- programs and packages

cp "$root/build/python/bin/byteps-server" "$part/bin/"
for program in ip tc sysctl; do
  path="$(PATH="$PATH:/usr/sbin:/sbin" command -v "$program")" ||
    fail "$program is missing: install iproute2 and procps"
  cp -L "$path" "$part/bin/"
done
cp -rL "$root"/build/python/{byteps,megatron_byteps-*.dist-info} "$part/python/"
# Packages that megatron.training imports.
for package in packaging omegaconf yaml psutil einops; do
  [[ -e $packages/$package ]] || fail "$packages has no $package: run make setup"
  cp -r "$packages/$package" "$part/python/"
done
cp -r "$root"/build/Megatron-LM/{megatron,pyproject.toml} "$part/Megatron-LM/"
for entry in "$root"/build/Megatron-LM/*.py; do
  if [[ -e $entry ]]; then cp "$entry" "$part/Megatron-LM/"; fi
done
expected=""
if [[ -n $extra ]]; then
  expected="$("$extra" "$root/scripts/bundle_packages.py" "${with[@]}" --to "$part/python")"
fi
find "$part" -name __pycache__ -prune -exec rm -rf {} +

# ---------------------------------------------------------------- shared libraries

# Libraries of C and of compilers belong to the machine: their newer versions run programs that were linked with older
# ones.
is_the_machines() {
  case "$1" in
    libc.so.* | libm.so.* | libdl.so.* | libpthread.so.* | librt.so.* | libresolv.so.*) return 0 ;;
    ld-linux* | libstdc++.so.* | libgcc_s.so.* | libpython*) return 0 ;;
    # The GPU's driver belongs to the machine. Other libraries come with PyTorch.
    libcuda.so.* | libnvidia* | libcudart.so.* | libnccl.so.* | libtorch* | libc10*) return 0 ;;
    *) return 1 ;;
  esac
}

while read -r name path; do
  if ! is_the_machines "$name"; then cp -L "$path" "$part/lib/$name"; fi
done < <(
  {
    find "$part/bin" -type f
    find "$part/python" "$part/Megatron-LM" -name '*.so'
  } | xargs -n 1 ldd | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}' | sort -u
)

# ---------------------------------------------------------------- activate

if ((${#with[@]} > 0)); then
  XZ_OPT=-T0 tar -cJf "$part/python.tar.xz" -C "$part" python
  rm -rf "$part/python"
fi

cat >"$part/activate" <<'TEXT'
# A shell reads this file: `. FOLDER/activate`. It puts this folder before the paths that the shell has.
bundle="$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")" && pwd)"
# Groups of many packages are compressed. A folder that exists is complete.
if [ ! -d "$bundle/python" ]; then
  rm -rf "$bundle/python.new" &&
    python3 -c 'import sys, tarfile
with tarfile.open(sys.argv[1]) as packed:
    packed.extractall(sys.argv[2], filter="tar")' "$bundle/python.tar.xz" "$bundle/python.new" &&
    mv "$bundle/python.new/python" "$bundle/python" && rmdir "$bundle/python.new"
fi
export PATH="$bundle/bin:$PATH"
# Benchmarks import each other by their paths in the checkout.
checkout="$(cd "$bundle/../.." && pwd)"
[ -e "$checkout/bench/kit" ] || checkout="$PWD"
if [ ! -e "$checkout/bench/kit" ]; then
  echo "error: $bundle lies in no checkout's build/: go to the checkout, and read this again" >&2
  checkout=""
fi
export PYTHONPATH="$bundle/python:$bundle/Megatron-LM${checkout:+:$checkout}${PYTHONPATH:+:$PYTHONPATH}"
export LD_LIBRARY_PATH="$bundle/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
unset bundle checkout
TEXT

mkdir -p "$(dirname "$folder")"
rm -rf "$folder"
cp -r "$part" "$folder"
chmod -R u+w,go+rX "$folder"
"$python" -c 'import sys; print("Python %d.%d" % sys.version_info[:2])' >"$folder/python-version"
echo "$folder: $(du -sm "$folder" | cut -f1) MB, for $(uname -m), $(<"$folder/python-version"), glibc" \
  "$(getconf GNU_LIBC_VERSION | cut -d' ' -f2) or later"
if [[ -n $expected ]]; then echo "$expected"; fi
