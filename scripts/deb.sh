#!/usr/bin/env bash
# Makes Debian packages of this tree, for each ARCH (default: that of this machine), and beside each its bill of
# materials, in bin/deb. The same commit gives the same bytes, wherever and whenever it is built by the same Go.
#
# usage: deb.sh [--help] [ARCH...]       amd64, arm64
#   DEB_VERSION         the version (default: from git: 1.2.0 at tag v1.2.0, 1.2.0+git20260102030405.abcdef0 after it)
#   DEB_OUT             where they are put (default: bin/deb)
#   SOURCE_DATE_EPOCH   the time of all files (default: that of the commit)
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022 # directories are packed as they are made
export TZ=UTC LC_ALL=C.UTF-8

# Of Go's settings only those that say where modules and toolchains come from and are kept; those that change the code are
# the same for everybody. Neither the environment nor what `go env -w` has written adds any.
for name in GOPROXY GOSUMDB GONOSUMDB GONOPROXY GOPRIVATE GOINSECURE GOAUTH GOVCS GOMODCACHE GOCACHE GOPATH GOTOOLCHAIN; do
	value=$(go env "$name")
	export "$name=$value"
done
unset GOOS GOARCH GODEBUG GOEXPERIMENT
export GOENV=off GOWORK=off GOFLAGS=-buildvcs=false GOAMD64=v1 GOARM64=v8.0 GOFIPS140=off

nfpm=github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.45.2

die() {
	echo "deb.sh: $*" >&2
	exit 1
}

host=$(dpkg --print-architecture)
arches=()
for arg in "$@"; do
	case $arg in
	amd64 | arm64) arches+=("$arg") ;;
	--help | -h)
		sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
		exit 0
		;;
	*)
		echo "deb.sh: unknown argument $arg; see --help" >&2
		exit 2
		;;
	esac
done
((${#arches[@]})) || arches=("$host")

# A tree of another user than root is read all the same.
git() { command git -c safe.directory="$PWD" "$@"; }

from_git() {
	local time tag version hash
	hash=$(git rev-parse --short=12 HEAD 2>/dev/null) ||
		die "this is no tree of git: say DEB_VERSION and SOURCE_DATE_EPOCH"
	time=$(TZ=UTC git log -1 --format=%cd --date=format-local:%Y%m%d%H%M%S)
	if tag=$(git describe --tags --match 'v[0-9]*' --exact-match 2>/dev/null); then
		version=$(release "$tag")
	elif tag=$(git describe --tags --match 'v[0-9]*' --abbrev=0 2>/dev/null); then
		version=$(release "$tag")+git$time.$hash
	else
		version=0.0~git$time.$hash
	fi
	[[ -z $(git status --porcelain --untracked-files=all) ]] || version+=+dirty
	echo "$version"
}

# A candidate (v1.2.0-rc.1) is before its release.
release() { sed 's/^v//; s/-/~/' <<<"$1"; }

version=${DEB_VERSION:-$(from_git)}
[[ $version =~ ^[0-9][0-9A-Za-z.+~]*$ ]] || die "$version is no version of a Debian package of its own upstream"
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH

work=$(mktemp -d "${TMPDIR:-/tmp}/agentbox-deb.XXXXXX")
trap 'rm -rf -- "$work"' EXIT
out=${DEB_OUT:-bin/deb}
mkdir -p "$out"

# changelog: CHANGELOG.md in Debian's form. What is not released yet is this version.
changelog() {
	awk -v version="$version" -v now="$(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")" '
	function flush(  line, n, i, w) {
		if (item == "") return
		n = split(item, w, " "); line = "  *"
		for (i = 1; i <= n; i++) {
			if (length(line) + length(w[i]) > 78 && line !~ /^ *\*?$/) { print line; line = "   " }
			line = line " " w[i]
		}
		print line; item = ""
	}
	function close_entry() { flush(); if (open) printf "\n -- The agentbox authors <agentbox@users.noreply.github.com>  %s\n\n", when }
	/^## / {
		close_entry()
		v = $2; gsub(/[][v]/, "", v); when = now
		if (v == "Unreleased") v = version
		else { "LC_ALL=C date -u -R -d " $4 | getline when }
		printf "agentbox (%s) unstable; urgency=medium\n\n", v; open = 1; next
	}
	!open { next }
	/^### / { flush(); printf "  [ %s ]\n", $2; next }
	/^- / { flush(); item = substr($0, 3); next }
	/^ / { item = item $0; next }
	END { close_entry() }' CHANGELOG.md
}

# place MODE FILE PATH: into the package.
place() { install -D -m "$1" "$2" "$stage$3"; }

# The pages and completions are written by the program itself, which has to run here.
make --no-print-directory man
for shell in bash zsh fish; do bin/agentbox completion "$shell" >"$work/$shell"; done

for arch in "${arches[@]}"; do
	stage=$work/$arch
	GOARCH=$arch make --no-print-directory build OUT="$stage/usr/bin" VERSION="$version"
	doc=/usr/share/doc/agentbox
	mkdir -p "$stage$doc"
	go run ./dist/deb/linked -version "$version" -copyright "$stage$doc/copyright" -sbom "$stage$doc/agentbox.cdx.json" "$stage"/usr/bin/*
	changelog >"$work/changelog"
	place 0644 "$work/changelog" "$doc/changelog"
	for page in bin/man/*.1; do place 0644 "$page" "/usr/share/man/man1/${page##*/}"; done
	gzip -9n "$stage$doc/changelog" "$stage"/usr/share/man/man1/*.1
	for page in README.md docs/*.md; do place 0644 "$page" "$doc/$page"; done
	place 0644 "$work/bash" /usr/share/bash-completion/completions/agentbox
	place 0644 "$work/zsh" /usr/share/zsh/vendor-completions/_agentbox
	place 0644 "$work/fish" /usr/share/fish/vendor_completions.d/agentbox.fish
	for policy in policy/builtin/*.yaml; do place 0644 "$policy" "$doc/examples/policies/${policy##*/}"; done
	place 0644 dist/deb/lintian-overrides /usr/share/lintian/overrides/agentbox
	place 0644 policy/schema.json /usr/share/agentbox/policy.schema.json
	for file in agentbox.service:systemd/system/agentbox.service agentbox.socket:systemd/system/agentbox.socket \
		sysusers.conf:sysusers.d/agentbox.conf tmpfiles.conf:tmpfiles.d/agentbox.conf; do
		place 0644 "dist/systemd/${file%%:*}" "/usr/lib/${file#*:}"
		# These are dpkg's.
		sed -i '1{/^# agentbox: made by/s/made by.*setup systemd`/of the package agentbox/}' "$stage/usr/lib/${file#*:}"
	done
	find "$stage" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
	name=agentbox_${version}_$arch
	ARCH=$arch VERSION=$version STAGE=$stage GOARCH='' go run "$nfpm" package --config dist/deb/nfpm.yaml --packager deb --target "$work/$name.deb" >"$work/log" || {
		cat "$work/log" >&2
		die "nfpm failed"
	}
	# Nobody is to find a package that was refused. lintian leaves a file behind where it works.
	TMPDIR=$work lintian --allow-root --fail-on error,warning "$work/$name.deb" || die "lintian objects to $name.deb"
	cp "$stage$doc/agentbox.cdx.json" "$out/$name.cdx.json"
	mv "$work/$name.deb" "$out/$name.deb"
	(cd "$out" && sha256sum "$name.deb")
done
for arch in "${arches[@]}"; do
	[[ $arch != "$host" ]] || echo "to install it here: apt install ${out/#bin/.\/bin}/agentbox_${version}_$arch.deb"
done
