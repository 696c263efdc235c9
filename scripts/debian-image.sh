#!/usr/bin/env bash
# Makes the root filesystem of the demo and the tests: this host's own Debian
# or Ubuntu release, minimal, with what an agent works with. Prints the path of
# the tarball. It is made once and then kept in the cache.
#
# usage: debian-image.sh [--servers | --node] [SUITE MIRROR] [--help]
#   --servers        another one: with PostgreSQL and nginx, whose processes are of several users
#   --node           another one: with Node.js and npm
#   SUITE MIRROR     another release of Debian, and where to get it
#   AGENTBOX_CACHE   where the tarball is kept, in its directory roots (default /var/cache/agentbox)
set -euo pipefail

packages=python3,git,redis-server,tmux,procps,iproute2,apt-utils,libeatmydata1
if [ "${1:-}" = --servers ]; then
	packages=postgresql,nginx-light,curl,procps
	shift
elif [ "${1:-}" = --node ]; then
	packages=nodejs,npm,python3,procps,xxd
	shift
fi

case "${1:-}" in
"") ;;
--help | -h)
	sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
	exit 0
	;;
[a-z]*)
	[ $# = 2 ] || { echo "debian-image.sh: a suite needs its mirror; see --help" >&2; exit 2; }
	;;
*)
	echo "debian-image.sh: unknown argument $1; see --help" >&2
	exit 2
	;;
esac

# shellcheck source=/dev/null
. /etc/os-release
suite=${1:-${VERSION_CODENAME:?this needs a Debian or Ubuntu release}}
# The cache may be /tmp or /srv. What is swept, and what is taken for an image, is in a directory of our own.
cache=${AGENTBOX_CACHE:-/var/cache/agentbox}/roots
(umask 077 && mkdir -p "$cache")
if [ -L "$cache" ] || [ ! -O "$cache" ] || [ -n "$(find "$cache" -maxdepth 0 -perm /022)" ]; then
	echo "debian-image.sh: $cache has to be a directory, and no symlink, that is yours and that nobody else may write to; AGENTBOX_CACHE names another place" >&2
	exit 1
fi
out=$cache/$suite-$(printf '%s' "$packages" | cksum | cut -d' ' -f1).tar
if [ -s "$out" ]; then
	echo "$out"
	exit
fi

# The mirror that this host's own packages come from, whatever form its
# sources are in.
components=main
[ "$ID" = ubuntu ] && [ $# = 0 ] && components=main,universe
# shellcheck disable=SC2016 # the placeholders are apt's
mirror=${2:-$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
	awk -v s="$suite" '$2 == s && $3 == "main" { print $1; exit }')}
if [ -z "$mirror" ]; then
	echo "debian-image.sh: apt has no package lists of $suite; run apt-get update" >&2
	exit 1
fi

# One at a time: two that start together share the result.
exec 9>"$cache/lock"
flock 9
if [ ! -s "$out" ]; then
	rm -rf --one-file-system "$cache"/tmp.* # what one that was killed had begun
	tmp=$(mktemp "$cache/tmp.XXXXXX")
	trap 'rm -rf --one-file-system "$tmp"*' EXIT
	mkdir "$tmp.d"
	export TMPDIR="$tmp.d"
	echo "making a $suite root filesystem (about a minute)" >&2
	# A mirror that is being renewed, or that stumbles once, is no reason to fail.
	for try in 1 2 3; do
		# What it mounts is not the host's, and it ends with this script.
		if setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child --mount-proc mmdebstrap --variant=minbase --format=tar --include="$packages" --components="$components" \
			--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
			--dpkgopt='path-exclude=/usr/share/man/*' "$suite" "$tmp" "$mirror" >"$tmp.log" 2>&1; then
			break
		fi
		tail -n 30 "$tmp.log" >&2
		if [ "$try" = 3 ]; then
			echo "debian-image.sh: mmdebstrap failed three times; its last lines are above" >&2
			exit 1
		fi
		echo "debian-image.sh: mmdebstrap failed; trying again in $((try * 10)) s" >&2
		sleep $((try * 10))
	done
	sync "$tmp"
	mv "$tmp" "$out"
fi
echo "$out"
