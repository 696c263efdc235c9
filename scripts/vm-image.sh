#!/usr/bin/env bash
# Makes what `make test-vm` boots: the disk of a Debian 13 with systemd and the
# engines, its kernel, and QEMU of Debian 13 where this host has none that is new
# enough. Prints the directory with disk.img, vmlinuz and initrd; QEMU is in
# qemu-trixie beside it. All of it is made once and then kept in the cache, under
# the hash of what it was made by. Of other hashes, as those of another tree, the image that
# was used last and those that machines run from are kept, too.
#
# usage: vm-image.sh [--image NAME] [--qemu] [--help]
#   --image NAME     trixie: all as Debian 13 has it (the default);
#                    docker28: the same with Docker Engine 28, its client, containerd and runc of Debian sid
#   --qemu           Debian 13's QEMU, too
#   AGENTBOX_CACHE   where it is kept (default /var/cache/agentbox)
#   AGENTBOX_VM_MIRROR
#                    where Debian 13 comes from (default http://deb.debian.org/debian)
#   AGENTBOX_VM_SID  where sid comes from (default: the same), as in a line of sources.list:
#                    '[check-valid-until=no] URL' takes a snapshot, or a mirror that is behind
set -euo pipefail

suite=trixie
mirror=${AGENTBOX_VM_MIRROR:-http://deb.debian.org/debian}
sid=${AGENTBOX_VM_SID:-$mirror}
disk=12G           # of the machine; the file has what is in it only
need_mb=6000       # while it is made: packages, the tree of files, the disk
need_qemu_mb=1000
limit=1800         # seconds that one mmdebstrap may take

here=$(cd "$(dirname "$0")" && pwd)
guest=(
	linux-image-cloud-amd64 systemd-sysv udev dbus kmod apparmor apparmor-utils
	runc crun conmon criu podman netavark aardvark-dns passt uidmap docker.io docker-cli docker-compose containerd containernetworking-plugins
	docker-registry skopeo umoci checkpointctl mmdebstrap debian-archive-keyring apt-utils ca-certificates busybox-static
	nftables iptables iproute2 iputils-ping python3 git tmux curl procps psmisc attr acl xz-utils zstd file patch
	e2fsprogs xfsprogs quota fuse3 strace openssl nginx-light
)

# What the image docker28 has of sid. What these depend on comes from there only where Debian 13's is too old.
of_sid=(docker.io docker-cli containerd runc)

image=$suite
want_qemu=false
while (($#)); do
	case $1 in
	--qemu) want_qemu=true ;;
	--image)
		image=${2:-}
		case $image in
		trixie | docker28) ;;
		*)
			echo "vm-image.sh: there is no image \"$image\"; see --help" >&2
			exit 2
			;;
		esac
		shift
		;;
	--help | -h)
		sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
		exit 0
		;;
	*)
		echo "vm-image.sh: unknown argument $1; see --help" >&2
		exit 2
		;;
	esac
	shift
done

die() {
	echo "vm-image.sh: $*" >&2
	exit 1
}

cache=${AGENTBOX_CACHE:-/var/cache/agentbox}/vm
key=$({ cat "$0" "$here/debian-image.sh" && printf '%s\n' "$mirror" "$sid"; } | sha256sum | cut -c1-12)
out=$cache/$image-$key
qemu=$cache/qemu-$suite
# The cache may be /tmp or /srv. What is swept, and what is booted, is in a directory of our own.
if [[ -e $cache || -L $cache ]] && [[ -L $cache || ! -O $cache || -n $(find "$cache" -maxdepth 0 -perm /022) ]]; then
	die "$cache has to be a directory, and no symlink, that is yours and that nobody else may write to; AGENTBOX_CACHE names another place"
fi

# whole: nothing is missing, as of what rm was removing when it was killed.
whole() { [[ -s $out/disk.img && -e $out/vmlinuz && -e $out/initrd ]]; }

missing_mb() {
	local need=0
	whole || need=$((need + need_mb))
	if $want_qemu && [[ ! -d $qemu ]]; then need=$((need + need_qemu_mb)); fi
	echo "$need"
}

if (($(missing_mb) == 0)); then
	touch "$out" # used now
	echo "$out"
	exit
fi
((EUID == 0)) || die "run this as root: it makes file systems"
for tool in mmdebstrap mke2fs; do
	command -v "$tool" >/dev/null || die "this needs $tool: apt-get install mmdebstrap e2fsprogs"
done
(umask 077 && mkdir -p "$cache")
# One at a time: two that start together share the result.
exec 9>"$cache/lock"
flock 9
# What one that was killed has begun is nobody's now.
rm -rf --one-file-system -- "$cache"/tmp.*
free=$(df --output=avail -BM "$cache" | tail -n 1 | tr -dc 0-9)
((free >= $(missing_mb))) ||
	die "$cache has $free MB free and this needs $(missing_mb) MB while it works (2000 MB are kept); AGENTBOX_CACHE puts it elsewhere"

work=$(mktemp -d "$cache/tmp.XXXXXX")
chmod 0755 "$work" # apt downloads as the user _apt
# What was killed may still be ending.
clear_up() {
	local tries=0
	until rm -rf --one-file-system -- "$work" 2>/dev/null; do
		((++tries < 50)) || { rm -rf --one-file-system -- "$work" || true; break; }
		sleep 0.1
	done
}
trap clear_up EXIT

# bounded COMMAND...: ended after a time, and with this script, however that ends. What it mounts is not the host's, and
# gone with it: mmdebstrap mounts /proc and /sys in what the next run removes.
child=''
bounded() {
	setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child --mount-proc timeout "$limit" "$@" 7>&- 9>&- &
	child=$!
	local ended=0
	wait "$child" || ended=$?
	child=''
	return "$ended"
}
stop() {
	if [[ -n $child ]]; then
		kill -KILL "$child" 2>/dev/null || true
		wait "$child" 2>/dev/null || true
	fi
	echo "vm-image.sh: interrupted; nothing of what it had begun is kept" >&7
	exit "$1"
}
exec 7>&2 # what is interrupted may have its output elsewhere
trap 'stop 130' INT
trap 'stop 143' TERM HUP

# root DIR PACKAGES OPTION...: a root filesystem.
root() {
	local dir=$1 packages=$2
	shift 2
	local sources=("$mirror")
	if [[ -s $dir.sid ]]; then
		sources+=("deb $sid sid main")
		set -- "$@" --setup-hook="mkdir -p \"\$1/etc/apt/preferences.d\"" --setup-hook="cp '$dir.sid' \"\$1/etc/apt/preferences.d/sid\""
	fi
	TMPDIR=$work bounded mmdebstrap --variant=minbase --format=directory --include="$packages" \
		--aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Retries "3"' --dpkgopt='path-exclude=/usr/share/doc/*' \
		--dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/man/*' \
		"$@" "$suite" "$dir" "${sources[@]}" >"$work/log" 2>&1 || {
		tail -n 30 "$work/log" >&2
		! grep -q 'Release file for .* is expired' "$work/log" ||
			die "a mirror is behind, or a snapshot; of sid that is taken with AGENTBOX_VM_SID='[check-valid-until=no] URL'"
		die "mmdebstrap failed or took more than $limit s; is $mirror reachable?"
	}
}

# Qemu, which is large, does not change with what is in the machine.
if $want_qemu && [[ ! -d $qemu ]]; then
	echo "fetching Debian 13's QEMU (two minutes)" >&2
	root "$work/qemu" qemu-system-x86,seabios
	sync -f "$work"
	mv "$work/qemu" "$qemu"
fi

if ! whole; then
	echo "making the disk $image of a Debian 13 (five minutes)" >&2
	if [[ $image = docker28 ]]; then
		printf 'Package: %s\nPin: release n=sid\nPin-Priority: %s\n\n' '*' 100 "${of_sid[*]}" 990 >"$work/root.sid"
	fi
	# The unit runs what the second disk has; everything that tests start themselves stays off, and so do AppArmor's
	# profiles of programs that are not here, which an emulated machine takes a minute to load.
	cat >"$work/agentbox-vm.service" <<-'UNIT'
		[Unit]
		Description=Does what the host asks for
		After=multi-user.target systemd-modules-load.service
		[Service]
		Type=exec
		ExecStartPre=/bin/mkdir -p /payload /work
		ExecStartPre=/bin/mount -o ro LABEL=payload /payload
		ExecStartPre=/bin/mount -o prjquota LABEL=work /work
		ExecStartPre=/bin/sh -c 'mkdir -m 1777 -p /work/tmp && mount --bind /work/tmp /tmp'
		ExecStart=/payload/vm guest /dev/virtio-ports/agentbox
		Environment=HOME=/root
		StandardOutput=journal+console
		StandardError=journal+console
		Delegate=yes
		TasksMax=infinity
		LimitNOFILE=65536
		[Install]
		WantedBy=basic.target
	UNIT
	# What debian-image.sh would make in the machine, which has no network.
	AGENTBOX_CACHE=$work/sandboxes TMPDIR=$work bounded "$here/debian-image.sh" "$suite" "$mirror" >/dev/null
	AGENTBOX_CACHE=$work/sandboxes TMPDIR=$work bounded "$here/debian-image.sh" --servers "$suite" "$mirror" >/dev/null
	# shellcheck disable=SC2016 # $1 is the hooks'
	root "$work/root" "$(IFS=, && echo "${guest[*]}")" \
		--customize-hook='find "$1/etc/apparmor.d" -maxdepth 1 -type f -delete' \
		--customize-hook="cp '$work/agentbox-vm.service' \"\$1/etc/systemd/system/\"" \
		--customize-hook='chroot "$1" systemctl enable agentbox-vm.service' \
		--customize-hook='chroot "$1" systemctl mask docker.service docker.socket containerd.service docker-registry.service podman.service podman.socket podman-restart.service nginx.service tmp.mount getty@tty1.service serial-getty@ttyS0.service apt-daily.timer apt-daily-upgrade.timer e2scrub_reap.service fstrim.timer dpkg-db-backup.timer systemd-networkd.service' \
		--customize-hook='echo agentbox-vm >"$1/etc/hostname"; printf "127.0.0.1 localhost agentbox-vm\n::1 localhost\n" >"$1/etc/hosts"; rm -f "$1/etc/resolv.conf"; : >"$1/etc/resolv.conf"'
	if [[ $image = docker28 ]]; then
		# Sid goes on; an image that has something else than its name says proves nothing.
		has=$(dpkg-query --root="$work/root" -W -f='${Version}' docker.io) || die "docker.io was not installed"
		[[ $has = 28.* ]] || die "$sid has Docker Engine $has by now, and the image docker28 is of 28: name a snapshot of sid that has it in AGENTBOX_VM_SID"
		dpkg-query --root="$work/root" -W -f='of sid: ${Package} ${Version}\n' "${of_sid[@]}" >&2
	fi
	install -d -m 0700 "$work/root/var/cache/agentbox" "$work/root/var/cache/agentbox/roots"
	mv "$work"/sandboxes/roots/*.tar "$work/root/var/cache/agentbox/roots/"
	cp -L "$work"/root/boot/vmlinuz-* "$work/vmlinuz"
	cp -L "$work"/root/boot/initrd.img-* "$work/initrd"
	rm -f "$work"/root/boot/initrd.img-*
	mke2fs -q -t ext4 -L root -E lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0 -d "$work/root" "$work/disk.img" "$disk" >"$work/log" 2>&1 || {
		cat "$work/log" >&2
		die "mke2fs failed"
	}
	sync -f "$work"
	mkdir "$work/$image-$key"
	mv "$work"/{vmlinuz,initrd,disk.img} "$work/$image-$key/"
	# Others of this name are of packages or scripts that were changed since, or of another tree that is at work, too.
	mapfile -t others < <(ls -td -- "$cache/$image"-* 2>/dev/null)
	for other in "${others[@]:1}"; do
		exec 8<"$other"
		# Test-vm has a lock on what it boots from. What is being removed has no image's name any more.
		! flock --nonblock 8 || mv -T -- "$other" "$work/old.${other##*/}"
		exec 8<&-
	done
	[[ ! -e $out ]] || mv -T -- "$out" "$work/broken"
	mv -T -- "$work/$image-$key" "$out"
fi
echo "$out"
