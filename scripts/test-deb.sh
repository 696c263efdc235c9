#!/usr/bin/env bash
# Tests the Debian package of the commit that is checked out: that it is built to the same bytes in another directory, with
# another umask and time zone, and whatever Go's settings are, and in a minimal Debian 12 and 13 (see fresh-root.sh) that it
# is installed, upgraded under a live sandbox, removed and purged as Debian's policy says.
# bin/fresh/deb-SUITE.log has all that was said.
#
# usage: test-deb.sh [--suite SUITE]... [--no-rebuild] [--help]
#   --suite        bookworm, trixie or another (default: both)
#   --no-rebuild   take what is in bin/deb, and do not ask whether it is reproducible; without it all has to be committed
set -euo pipefail
cd "$(dirname "$0")/.."

suites=() rebuild=true
while (($#)); do
	case $1 in
	--suite) suites+=("${2:?}") && shift ;;
	--no-rebuild) rebuild=false ;;
	--help | -h)
		sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
		exit 0
		;;
	*)
		echo "test-deb.sh: unknown argument $1; see --help" >&2
		exit 2
		;;
	esac
	shift
done
((${#suites[@]})) || suites=(bookworm trixie)

arch=$(dpkg --print-architecture)
old=0.0~0
work=$(mktemp -d "${TMPDIR:-/tmp}/agentbox-test-deb.XXXXXX")
trap 'rm -rf -- "$work"' EXIT
if $rebuild; then
	[[ -z $(git -c safe.directory="$PWD" status --porcelain --untracked-files=all) ]] || {
		echo "test-deb.sh: not everything is committed, and only a commit can be built a second time: commit it first" >&2
		exit 1
	}
	rm -f bin/deb/*_"$arch".deb
	DEB_VERSION=$old scripts/deb.sh
	scripts/deb.sh
	(
		umask 077 # as an administrator may have it
		git -c safe.directory="$PWD" clone --quiet --no-hardlinks . "$work/elsewhere/deeper"
		TZ=XYZ-11 GOAMD64=v3 GOFLAGS=-tags=failpoint "$work/elsewhere/deeper/scripts/deb.sh"
	)
	for file in "$work"/elsewhere/deeper/bin/deb/*; do
		cmp "$file" "bin/deb/${file##*/}"
		echo "the same bytes: ${file##*/}"
	done
fi
new=''
for file in bin/deb/*_"$arch".deb; do
	[[ $file == */agentbox_"$old"_"$arch".deb ]] || new=$file
done
[[ -s bin/deb/agentbox_${old}_$arch.deb && -s $new ]] || { echo "test-deb.sh: no packages in bin/deb" >&2 && exit 1; }

# shellcheck disable=SC2016 # for the shell in the root
steps=(
	'export DEBIAN_FRONTEND=noninteractive; apt-get update -q && apt-get install -q -y /root/old.deb 2>&1'
	'agentbox version && [ "$(agentbox version --format json | grep -c "\"agentbox\": *\"0.0~0\"")" = 1 ]'
	# The distribution's CRIU may not know this host's kernel (or its sockets), which doctor says; everything else has to be there.
	'agentbox doctor | tee /root/doctor; [ -s /root/doctor ] && ! grep ^fail /root/doctor | grep -Ev "^fail +(criu|sockets) "'
	'set -e; cd /usr; ls -l bin/agentbox bin/agentbox-runtime libexec/docker/cli-plugins/docker-agentbox lib/systemd/system/agentbox.{service,socket} \
		lib/sysusers.d/agentbox.conf lib/tmpfiles.d/agentbox.conf share/bash-completion/completions/agentbox share/zsh/vendor-completions/_agentbox \
		share/fish/vendor_completions.d/agentbox.fish share/agentbox/policy.schema.json; dpkg --verify agentbox; bash -n share/bash-completion/completions/agentbox'
	'libexec=/usr/libexec/docker/cli-plugins; $libexec/docker-agentbox docker-cli-plugin-metadata | grep ShortDescription'
	'set -e; getent group agentbox; stat -c "%a %U" /run/agentbox | grep "711 root"
		ls -l /etc/systemd/system/sockets.target.wants/agentbox.socket /etc/systemd/system/multi-user.target.wants/agentbox.service'
	'agentbox run -d --name c busybox sh -c "i=0; while :; do i=\$((i+1)); echo \$i > /count; sleep 0.2; done"; sleep 1; agentbox inspect c | grep -w pid >/root/pid; cat /root/pid'
	'set -e; dpkg -i /root/new.deb 2>&1; if agentbox version | grep 0.0~0; then exit 1; fi; agentbox inspect c | grep -w pid | diff /root/pid -
		a=$(agentbox exec c cat /count); sleep 1; b=$(agentbox exec c cat /count); echo "the sandbox goes on: $a, then $b"; [ "$b" -gt "$a" ]
		agentbox checkpoint c --name kept --files-only; agentbox exec c sh -c "echo lost >/kept"; agentbox restore c kept; agentbox exec c test ! -e /kept; agentbox ps -a'
	'set -e; apt-get remove -q -y agentbox 2>&1 | tee /root/said; grep "sandboxes are left" /root/said; test -d /var/lib/agentbox; if command -v agentbox; then exit 1; fi; test ! -e /usr/lib/systemd/system/agentbox.socket'
	'set -e; if dpkg --purge agentbox 2>&1; then echo "purged under a sandbox"; exit 1; fi; test -n "$(ls /var/lib/agentbox)"'
	'set -e; dpkg -i /root/new.deb 2>&1; agentbox ps -a; agentbox exec c true; agentbox checkpoint ls c | grep kept; agentbox rm -f c; agentbox prune; agentbox lease create --for 1h
		agentbox run --name stopped busybox true; grep -l agentbox /sys/class/net/*/uevent; apt-get purge -q -y agentbox 2>&1'
	'for i in $(seq 100); do [ -z "$(grep -lx agentbox /proc/*/comm 2>/dev/null)" ] && exit; sleep 0.2; done; grep -x agentbox /proc/*/comm; exit 1'
	'set -e; test ! -e /var/lib/agentbox; test ! -e /run/agentbox; if grep agentbox /sys/class/net/*/uevent || find /sys/fs/cgroup -type d -name agentbox | grep .; then exit 1; fi; if dpkg-query -W agentbox 2>/dev/null || cut -d" " -f5 /proc/self/mountinfo | grep agentbox; then exit 1; fi
		echo "what remains:"; find / -xdev -iname "*agentbox*" -not -path "/proc/*" | tee /root/remains; if grep -v "^/var/\(cache/apt\|log\)/" /root/remains; then exit 1; fi; getent group agentbox'
)
mkdir -p bin/fresh
status=0
for suite in "${suites[@]}"; do
	echo "==> $suite: the log is bin/fresh/deb-$suite.log"
	scripts/fresh-root.sh --file "bin/deb/agentbox_${old}_$arch.deb:/root/old.deb" --file "$new:/root/new.deb" \
		"$suite" "${steps[@]}" >"bin/fresh/deb-$suite.log" 2>&1 || {
		status=1
		tail -n 30 "bin/fresh/deb-$suite.log"
		echo "==> $suite: FAILED"
	}
done
((status)) || echo "the package is as it should be: ${suites[*]}"
exit "$status"
