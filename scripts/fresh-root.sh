#!/usr/bin/env bash
# Runs commands in a minimal Debian that has nothing of ours and nothing of this host: a root of its own, made by
# mmdebstrap (and make), in mount, pid, network, cgroup, uts and ipc namespaces of its own. Of the host it has the
# kernel, /dev, and the way to the network: Debian's mirror, proxies, certificates, Go's proxy settings.
# It ends at the first command that fails, with 1. What the commands started is gone when this script is, however it ends.
#
# usage: fresh-root.sh [OPTION...] SUITE COMMAND...
#   --tree              the tree, as git has it (HEAD), at /root/agentbox, where commands are run then
#   --file FILE:PATH    a file of the host at PATH; as often as you like
#   --mirror URL        Debian's mirror (default: this host's)
#   --limit SECONDS     the most that one command may take (default 7200)
#   --report FILE       add a line of a table per command: suite, command, result, minutes, megabytes on the disk
#   AGENTBOX_CACHE      where roots are made and kept, in its directory fresh (default /var/cache/agentbox)
set -euo pipefail

need_mb=8000 # for all that the README's commands make

die() {
	echo "fresh-root.sh: $*" >&2
	exit 1
}

# ---- clearing up: a process of its own, that waits until the script has ended ------------------------------------

# hierarchies lists where the host has cgroups mounted.
hierarchies() { awk '{ for (i = 7; $i != "-"; i++); if ($(i+1) ~ /^cgroup2?$/) print $5 }' /proc/self/mountinfo; }

clear_up() { # DIR CGROUP
	local mount pid tries=0 left
	cat >/dev/null # ends when nobody can write any more
	while ((tries++ < 300)); do
		left=''
		for mount in $(hierarchies); do
			[[ -d $mount/$2 ]] || continue
			for pid in $(find "$mount/$2" -name cgroup.procs -exec cat {} + 2>/dev/null | sort -u); do
				left+=" $pid"
				kill -KILL "$pid" 2>/dev/null || true
			done
		done
		[[ -n $left ]] || break
		sleep 0.1
	done
	for mount in $(hierarchies); do
		[[ ! -d $mount/$2 ]] || find "$mount/$2" -depth -type d -exec rmdir {} + || true
	done
	# What was killed may still be ending.
	tries=0
	until rm -rf --one-file-system -- "$1" 2>/dev/null; do
		((++tries < 50)) || { rm -rf --one-file-system -- "$1" || true; break; }
		sleep 0.1
	done
}

# sweep clears up after runs that were killed together with what clears up after them, or that a crash of the host has
# ended: nobody has their lock. Called by who may make a run, so that none of these is just being made.
sweep() {
	local run
	for run in "$cache"/fresh/run.*; do
		{ exec 6<"$run"; } 2>/dev/null || continue
		! flock --nonblock 6 || clear_up "$run" "agentbox-fresh.${run##*.}" </dev/null
		exec 6<&-
	done
}

# ---- inside: what makes the namespaces a machine -------------------------------------------------------------------

inside() { # ROOT SECONDS COMMAND...
	local root=$1 limit=$2 mount kind options there
	shift 2
	mount --make-rprivate /
	mount --bind "$root" "$root"
	mount --make-private "$root"
	mount -t proc proc "$root/proc"
	mount -t sysfs sysfs "$root/sys"
	mount --bind /dev "$root/dev"
	mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts "$root/dev/pts"
	[[ -L /dev/ptmx ]] || mount --bind "$root/dev/pts/ptmx" "$root/dev/ptmx"
	mount -t tmpfs -o nosuid,nodev shm "$root/dev/shm"
	mount -t tmpfs -o mode=0755,nosuid,nodev run "$root/run"
	mkdir -p "$root/run/lock"
	if [[ -d /lib/modules ]]; then # the kernel's
		mkdir -p "$root/lib/modules"
		mount --bind -o ro /lib/modules "$root/lib/modules"
	fi
	# Cgroups as on the host, from the run's own one on.
	while read -r mount kind options; do
		if [[ $mount == /sys/fs/cgroup ]]; then
			mount -t "$kind" -o "$options" "$kind" "$root$mount"
		else
			mkdir -p "$root$mount"
			mount -t "$kind" -o "$options" "$kind" "$root$mount"
		fi
		if [[ $kind == cgroup2 && $mount == /sys/fs/cgroup ]]; then # else no controller could be turned on below
			mkdir "$root$mount/init"
			echo 0 >"$root$mount/init/cgroup.procs"
		fi
	done < <(awk '{ for (i = 7; $i != "-"; i++); if ($5 == "/sys/fs/cgroup" || $(i+1) ~ /^cgroup2?$/) print $5, $(i+1), $(i+3) }' /proc/self/mountinfo |
		sed 's/\(^\|[ ,]\)rw,\?/\1/; s/,seclabel//; s/ $/ rw/')
	find /sys/fs/cgroup -maxdepth 1 -type l -exec cp -P {} "$root/sys/fs/cgroup/" \;
	ip link set lo up
	hostname fresh
	read -r there <"$root/ready"
	if [[ $there != ready ]]; then
		cat "${root%/*}/slirp" >&2
		die "slirp4netns made no network: what it says is above"
	fi
	rm "$root/ready"
	cd "$root"
	mkdir -p mnt
	pivot_root . mnt
	umount -l /mnt
	mount --make-rshared / # as systemd has it
	# A shell's background job ignores signals, and nothing here may inherit that.
	# shellcheck disable=SC2016 # for the shell in the root
	exec chroot . /usr/bin/env --default-signal -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root USER=root LOGNAME=root \
		TERM=dumb LANG=C.UTF-8 "${pass[@]}" /bin/bash -c '
		cd /root/agentbox 2>/dev/null || cd /root
		disk() { du -smx / 2>/dev/null | cut -f1; }
		had=$(disk)
		limit=$1
		shift
		for command; do
			printf "\n==> %s\n" "$command"
			start=$SECONDS status=0
			timeout --kill-after=60 "$limit" bash -c "$command" 3>&- </dev/null || status=$?
			has=$(disk) took=$((SECONDS - start))
			((status)) && result="failed ($status)" || result=ok
			((status == 0 || took < limit)) || result="ended after $limit s, its bound"
			printf "| %s | %d.%d | %+d |\n" "$result" $((took / 60)) $((took % 60 / 6)) $((has - had)) >&3
			printf "==> %s: %s, %d s, %+d MB\n" "$command" "$result" $took $((has - had))
			had=$has
			((status == 0)) || exit 1
		done
	' fresh "$limit" "$@"
}

# ---- the root --------------------------------------------------------------------------------------------------------

# The apt settings that lead to the mirror.
apt_settings() {
	apt-config dump 2>/dev/null | grep -E '^Acquire::((https?|ftp)::Proxy|Check-Valid-Until|Check-Date|Retries)' || true
}

debian_mirror() {
	# shellcheck disable=SC2016 # the placeholder is apt's
	apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' 'Component: main' 2>/dev/null |
		head -n 1 | grep . || echo http://deb.debian.org/debian
}

# root_tar SUITE: tar is a root as a tar file, made once. It ends with this script, which is its parent, and so does what
# it mounts.
root_tar() {
	local options=() line tmp=$cache/fresh/tmp
	rm -rf --one-file-system -- "$tmp"* # what one that was killed had begun
	while read -r line; do
		[[ -z $line ]] || options+=(--aptopt="$line")
	done < <(apt_settings)
	tar=$cache/fresh/$1-$(printf '%s\n' "$mirror" "${options[@]}" | cksum | cut -d' ' -f1).tar
	[[ ! -s $tar ]] || return 0
	echo "making a minimal $1 (a minute)" >&2
	mkdir "$tmp.d"
	TMPDIR=$tmp.d setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child --mount-proc \
		mmdebstrap --variant=minbase --include=make --format=tar "${options[@]}" "$1" "$tmp.tar" "$mirror" >"$tmp.log" 2>&1 || {
		tail -n 30 "$tmp.log" >&2
		die "mmdebstrap failed; is $mirror reachable?"
	}
	sync "$tmp.tar"
	mv "$tmp.tar" "$tar"
	rm -rf --one-file-system -- "$tmp"*
}

# Authorities that this host trusts and Debian does not, such as that of a proxy: the package takes them when it comes.
own_authorities() { # DIR
	local bundle=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
	[[ -s $bundle ]] || return 0
	mkdir -p "$1"
	awk -v dir="$1" '
		FNR == 1 { part++ }
		/BEGIN CERTIFICATE/ { body = ""; in_one = 1 }
		in_one { body = body $0 "\n" }
		/END CERTIFICATE/ {
			in_one = 0
			if (FILENAME != ARGV[ARGC-1]) known[body] = 1
			else if (!(body in known)) { f = dir "/host-" ++n ".crt"; printf "%s", body > f; close(f) }
		}' /usr/share/ca-certificates/*/*.crt "$bundle"
}

# environment fills pass with how this host gets to the network. A proxy on its loopback is at the gateway.
environment() {
	local name
	for name in http_proxy https_proxy ftp_proxy all_proxy no_proxy HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY NO_PROXY \
		GOPROXY GOSUMDB GONOSUMDB GONOPROXY GOPRIVATE GOINSECURE; do
		local value=${!name:-}
		if [[ -z $value && $name == GO* ]]; then
			value=$(cd / && go env "$name" 2>/dev/null) || true
		fi
		[[ -z $value ]] || pass+=("$name=$(sed -E 's#(://([^@/]*@)?)(127\.0\.0\.1|localhost|\[::1\])#\110.0.2.2#g' <<<"$value")")
	done
}

# ---- main ------------------------------------------------------------------------------------------------------------

pass=()
if [[ ${1:-} == --clear-up ]]; then
	trap '' HUP INT TERM
	clear_up "$2" "$3"
	exit
fi
if [[ ${1:-} == --inside ]]; then
	mapfile -d '' -t pass <"$2/pass"
	rm "$2/pass"
	shift
	inside "$@"
fi

tree=false files=() mirror='' report=/dev/null limit=7200
while (($#)); do
	case $1 in
	--tree) tree=true ;;
	--file) files+=("${2:?}") && shift ;;
	--mirror) mirror=${2:?} && shift ;;
	--limit) limit=${2:?} && shift ;;
	--report) report=${2:?} && shift ;;
	--help | -h)
		sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
		exit 0
		;;
	-*)
		echo "fresh-root.sh: unknown option $1; see --help" >&2
		exit 2
		;;
	*) break ;;
	esac
	shift
done
(($# >= 2)) || { echo "usage: fresh-root.sh [OPTION...] SUITE COMMAND...; see --help" >&2 && exit 2; }
suite=$1
shift
[[ $limit =~ ^[1-9][0-9]*$ ]] || die "--limit is a number of seconds, not $limit"
((EUID == 0)) || die "run this as root: it makes namespaces"
for tool in mmdebstrap slirp4netns unshare pivot_root ip git; do
	command -v "$tool" >/dev/null || die "this needs $tool; scripts/install-deps.sh --fresh installs it"
done
here=$(cd "$(dirname "$0")/.." && pwd)
self=$here/scripts/fresh-root.sh
mirror=${mirror:-$(debian_mirror)}
cache=${AGENTBOX_CACHE:-/var/cache/agentbox}
# The cache may be /tmp or /srv. What is swept, and what is taken for a root, is in a directory of our own.
(umask 077 && mkdir -p "$cache/fresh")
if [[ -L $cache/fresh || ! -O $cache/fresh || -n $(find "$cache/fresh" -maxdepth 0 -perm /022) ]]; then
	die "$cache/fresh has to be a directory, and no symlink, that is yours and that nobody else may write to; AGENTBOX_CACHE names another place"
fi
# One root at a time is made; two that start together share it.
exec 9>"$cache/fresh/lock"
flock 9
sweep 9>&-
free=$(df --output=avail -BM "$cache" | tail -n 1 | tr -dc 0-9)
((free >= need_mb)) || die "$cache has $free MB free, and this needs up to $need_mb MB; AGENTBOX_CACHE puts it elsewhere"
root_tar "$suite" 9>&-

dir=$(mktemp -d "$cache/fresh/run.XXXXXX")
# This script has its lock, and so has what clears up after it. What runs in the root has not, which may outlive both.
exec 7<"$dir"
flock 7
exec 9>&-
cgroup=agentbox-fresh.${dir##*.}
mkfifo "$dir/alive"
# In a session of its own: a Ctrl-C is not for it, and it outlives this script, which it waits for.
setsid "$self" --clear-up "$dir" "$cgroup" <"$dir/alive" >/dev/null 2>&1 &
cleaner=$!
exec 8>"$dir/alive"
# shellcheck disable=SC2317 # called by the trap
finish() {
	local status=$?
	trap - EXIT
	exec 8>&-
	wait "$cleaner" || true
	exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

root=$dir/root
mkdir -m 0755 "$root"
# What fills it ends with this script, or it would write on beside what clears up.
setpriv --pdeathsig KILL tar -C "$root" --numeric-owner --xattrs --xattrs-include='*' -xpf "$tar" 7<&- 8>&-
printf 'nameserver 10.0.2.3\n' >"$root/etc/resolv.conf"
printf '127.0.0.1 localhost fresh\n::1 localhost\n' >"$root/etc/hosts"
own_authorities "$root/usr/local/share/ca-certificates" 7<&- 8>&-
if $tree; then
	setpriv --pdeathsig KILL git -c safe.directory="$here" clone --quiet --no-hardlinks "$here" "$root/root/agentbox" 7<&- 8>&-
	setpriv --pdeathsig KILL git -C "$root/root/agentbox" remote remove origin 7<&- 8>&-
fi
for file in "${files[@]}"; do
	install -D -m 0644 "${file%%:*}" "$root${file#*:}"
done
environment 7<&- 8>&-
printf '%s\0' "${pass[@]}" >"$root/pass"
mkfifo "$root/ready"

# enter joins the run's own cgroups, which are all that the cleaner goes by.
enter() {
	local mount
	for mount in $(hierarchies); do
		mkdir -p "$mount/$cgroup"
		if [[ -e $mount/cpuset.cpus && -e $mount/$cgroup/cpuset.mems ]]; then
			cat "$mount/cpuset.cpus" >"$mount/$cgroup/cpuset.cpus"
			cat "$mount/cpuset.mems" >"$mount/$cgroup/cpuset.mems"
		fi
		echo "$BASHPID" >"$mount/$cgroup/cgroup.procs"
	done
}

# network gives the namespaces of what waits at root/ready a network through this host's sockets.
network() {
	local pid i
	for ((i = 0; i < 300; i++)); do
		# The first process in the namespaces is the only child of unshare.
		pid=$(tr -d ' ' 2>/dev/null <"/proc/$1/task/$1/children") || true
		if [[ -n $pid && $(readlink "/proc/$pid/ns/net") != "$(readlink /proc/self/ns/net)" ]]; then
			# Without a word the other end of the pipe closes when it ends.
			slirp4netns --configure --mtu=65520 --ready-fd=5 "$pid" tap0 \
				5> >(if read -r -t 60 -n 1 _; then echo ready; else echo none; fi >"$root/ready") >/dev/null 2>"$dir/slirp"
			return
		fi
		sleep 0.1
	done
	echo "no namespaces within 30 s" >"$dir/slirp"
	echo none >"$root/ready"
}

mapfile -t rows < <(for command in "$@"; do echo "| $suite | \`$command\` "; done)
status=0
(
	exec 7<&- 8>&-
	enter
	# It ends with what it serves.
	unshare --mount --pid --fork --kill-child --uts --ipc --net --cgroup --propagation private "$self" --inside "$root" "$limit" "$@" 3>"$dir/results" </dev/null &
	child=$!
	network "$child" 3>&- &
	wait "$child"
) & # waited for, so that a signal is handled at once
wait $! || status=$?
i=0
while read -r result; do
	echo "${rows[i]}$result" >>"$report"
	((++i))
done <"$dir/results" || true
exit "$status"
