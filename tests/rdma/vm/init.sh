#!/bin/busybox sh
# shellcheck shell=dash
# The guest's first process. The guest's root is the host's root, read-only. A layer in memory on top takes what the
# guest writes. Only the folder $out, shared at the same path, is written through. Runs $out/start there and leaves its
# exit status in $out/status.
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
for module in virtio_pci virtio_rng 9pnet_virtio 9p overlay; do
  $b modprobe $module
done
for word in $($b cat /proc/cmdline); do
  case $word in
    out=*) out=${word#out=} ;;
    host_name=*) $b hostname "${word#host_name=}" ;;
    epoch=*) $b date -s "@${word#epoch=}" >/dev/null ;;
  esac
done
options=trans=virtio,version=9p2000.L,msize=524288
$b mount -t 9p -o $options,ro,cache=loose host /ro
$b mount -t tmpfs -o size=75% tmpfs /rw
$b mkdir -p /rw/upper /rw/work
$b mount -t overlay -o lowerdir=/ro,upperdir=/rw/upper,workdir=/rw/work overlay /new
while read -r module; do
  $b modprobe "$module"
done </modules
$b mount -t proc proc /new/proc
$b mount -t sysfs sys /new/sys
$b mount -t devtmpfs dev /new/dev
$b mkdir -p /new/dev/shm /new/dev/pts
$b mount -t tmpfs tmpfs /new/dev/shm
$b mount -t devpts devpts /new/dev/pts
$b mount -t tmpfs tmpfs /new/run
$b mkdir -p "/new$out"
$b mount -t 9p -o $options,rw out "/new$out"
# The files of depmod, for modprobe and modinfo.
$b mkdir -p /new/lib/modules
$b cp -r "/lib/modules/$($b uname -r)" /new/lib/modules/ 2>/dev/null
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
  $b chroot /new /bin/bash "$out/start"
echo $? >"/new$out/status.part"
$b mv "/new$out/status.part" "/new$out/status"
$b sync
$b poweroff -f
