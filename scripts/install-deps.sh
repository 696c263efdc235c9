#!/usr/bin/env bash
# Installs what agentbox needs on Debian 12/13 and Ubuntu 22.04/24.04: packages by apt, Go, and a CRIU that works here.
# Run it as root, as often as you like: when nothing is missing it changes nothing and calls no apt.
set -euo pipefail

usage() {
	cat <<-'TEXT'
		usage: install-deps.sh [--check] [--test] [--bench] [--package] [--fresh]

		  --check   say what is missing and how to get it; change nothing (exit 1 if anything is missing)
		  --test    also what the tests run: Docker with compose, containerd, Podman, a registry, skopeo and umoci
		  --package also what makes and judges the Debian package: lintian
		  --bench   also what the benchmarks compare with: all of that, crun and restic
		  --fresh   also what the tests in a fresh Debian enter it by: slirp4netns
		  --help    this text
	TEXT
}

# ---- what is needed -------------------------------------------------------------------------------------------------

# COMMAND:PACKAGE. Looked for by command, so that another package's runc (containerd.io) or a git of your own will do.
NEEDED=(
	# to run sandboxes
	runc:runc conmon:conmon iptables:iptables nft:nftables ip:iproute2 nsenter:util-linux mount:mount
	xz:xz-utils zstd:zstd tar:tar
	# demo and tests
	mmdebstrap:mmdebstrap git:git python3:python3 make:make getfattr:attr getfacl:acl tmux:tmux curl:curl pgrep:procps
	apt-ftparchive:apt-utils shellcheck:shellcheck
)
# The engines. Debian 13 has the client of Docker in a package of its own.
ENGINES=(dockerd:docker.io docker:docker-cli containerd:containerd docker-compose:docker-compose podman:podman systemd-analyze:systemd)
# A registry, and judges of images.
IMAGES=(docker-registry:docker-registry skopeo:skopeo umoci:umoci)
# What the tests use besides, and a minimal root does not have.
TOOLS=(patch:patch mkfs.ext4:e2fsprogs chattr:e2fsprogs)
BENCH=(crun:crun restic:restic)
PACKAGE=(lintian:lintian)
FRESH=(slirp4netns:slirp4netns)

# To build CRIU, when the distribution's does not work here.
CRIU_BUILD=(
	gcc libc6-dev make pkg-config xz-utils libprotobuf-dev libprotobuf-c-dev protobuf-c-compiler protobuf-compiler
	python3-protobuf libnl-3-dev libcap-dev libnet1-dev libbsd-dev libnftables-dev uuid-dev
)
CRIU_SUITES=(trixie sid) # Debian suites with a CRIU 4.x, the first that works wins
CRIU_TARGET=/usr/local/sbin/criu

GO_MINOR=21 # Go 1.21 and later fetch the toolchain that go.mod names

LOCK_TIMEOUT=300 # seconds to wait for another apt, such as the unattended upgrade of a machine just booted

DEBIAN_KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

# ---- small tools ----------------------------------------------------------------------------------------------------

WORK='' # temporary directory, made by begin_changes
LOG=''
CRIU_ON_TRIAL=false # the distribution's criu is installed by us and has not passed its check yet

step() { printf '==> %s\n' "$*"; }

die() {
	if [[ -s $LOG ]]; then
		printf -- '---- end of %s\n' "$LOG" >&2
		tail -n 25 "$LOG" >&2
		printf -- '----\n' >&2
	fi
	printf 'install-deps.sh: %s\n' "$*" >&2
	exit 1
}

cleanup() {
	local status=$?
	trap - EXIT
	if $CRIU_ON_TRIAL; then
		drop_trial_criu || status=1
	fi
	if [[ -n $WORK ]]; then
		rm -rf -- "$WORK" "$CRIU_TARGET.new"
	fi
	# The log of a failure stays for whoever has to find its cause.
	if ((status == 0)) && [[ -n $LOG ]]; then
		rm -f -- "$LOG"
	fi
	exit "$status"
}

quietly() { "$@" >>"$LOG" 2>&1 </dev/null; }

# The first call that has something to change makes the log and the temporary directory, and refreshes apt's lists.
begin_changes() {
	[[ -z $WORK ]] || return 0
	LOG=$(mktemp --tmpdir agentbox-install-deps.XXXXXX.log)
	WORK=$(mktemp -d --tmpdir agentbox-install-deps.XXXXXX)
	chmod 755 "$WORK" # apt downloads as the user _apt
	step "apt-get update"
	# The lists have a lock that DPkg::Lock::Timeout does not cover. A broken third-party source is no reason to stop
	# either: the lists at hand may do, and the install says so if they do not.
	local deadline=$((SECONDS + LOCK_TIMEOUT))
	until quietly apt_get update; do
		if ((SECONDS > deadline)) || ! tail -n 3 "$LOG" | grep -q 'lists/lock'; then
			step "apt-get update reported errors; going on with the lists that are there"
			return
		fi
		sleep 5
	done
}

apt_get() {
	DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 \
		apt-get -q -y --no-install-recommends -o DPkg::Lock::Timeout=$LOCK_TIMEOUT "$@"
}

# No package of this machine is removed for one that we would like: without docker-ce its containers would stop.
apt_install() { apt_get install --no-remove "$@"; }

candidate() { LC_ALL=C apt-cache policy "$1" | sed -n 's/^  Candidate: //p' | grep -v '^(none)$'; }

# ---- what is there --------------------------------------------------------------------------------------------------

is_static() { [[ $(LC_ALL=C ldd "$1" 2>&1) =~ "not a dynamic executable"|"statically linked" ]]; }

missing_packages() {
	local item busybox
	for item in "$@"; do
		command -v "${item%%:*}" >/dev/null || echo "${item#*:}"
	done
	# By netavark, as Debian 13 has it, Podman takes no container off a network of one's own without its partner.
	if [[ " $* " == *" podman:podman "* && -x /usr/lib/podman/netavark && ! -x /usr/lib/podman/aardvark-dns ]]; then
		echo aardvark-dns
	fi
	# A busybox that is to run in an empty root has to be the static one.
	busybox=$(command -v busybox) && is_static "$busybox" || echo busybox-static
	[[ -s /etc/ssl/certs/ca-certificates.crt ]] || echo ca-certificates
	# Verifies Debian's archive, for CRIU's source and for mmdebstrap (Ubuntu does not have it from the start).
	[[ -s $DEBIAN_KEYRING ]] || echo debian-archive-keyring
}

# The go in PATH, or the one that the Go project's archive installs, which sudo's PATH leaves out.
go_is_enough() {
	local go version
	for go in "$(command -v go)" /usr/local/go/bin/go; do
		version=$(cd / && GOTOOLCHAIN=local "$go" version 2>/dev/null) || continue
		[[ $version =~ go1\.([0-9]+) ]] && ((BASH_REMATCH[1] >= GO_MINOR)) && return
	done
	return 1
}

criu_works() {
	command -v "$1" >/dev/null && timeout 60 "$1" check 2>&1 </dev/null && dumps_sockets "$("$1" --version | sed -n 's/^Version: //p')"
}

# What `criu check` does not find: since Linux 6.16 only CRIU 4.2 and newer can dump an internet socket.
dumps_sockets() { # CRIU'S-VERSION
	if ! at_least 6.16 "$(uname -r)" || at_least 4.2 "$1"; then
		return
	fi
	echo "criu $1 cannot dump internet sockets on Linux $(uname -r)"
	return 1
}

# at_least A B: version B is A or newer.
at_least() { [[ $(printf '%s\n' "$1" "$2" | sort -V | head -n 1) == "$1" ]]; }

check() {
	local package missing=0
	lacks() {
		printf 'missing: %-22s %s\n' "$1" "$2"
		missing=1
	}
	for package in $(missing_packages "$@"); do
		lacks "$package" "apt-get install --no-install-recommends $package"
	done
	go_is_enough || lacks "go 1.$GO_MINOR or newer" "scripts/install-deps.sh (installs the distribution's or its backport)"
	if ! command -v criu >/dev/null; then
		lacks "criu" "scripts/install-deps.sh (installs the distribution's, or builds one if that does not work here)"
	elif ((EUID != 0)); then
		echo "not checked: whether criu works ('criu check' needs root)"
	elif ! criu_works criu >/dev/null; then
		lacks "a criu that works here" "scripts/install-deps.sh builds one ('criu check' says why $(command -v criu) does not work)"
	fi
	((missing)) || echo "nothing is missing"
	return "$missing"
}

# ---- packages -------------------------------------------------------------------------------------------------------

install_packages() {
	begin_changes
	step "installing $*"
	quietly apt_install "$@" ||
		die "apt could not install: $*. Cure what it says above (on Ubuntu, is 'universe' enabled?) and run this again." \
			"Where it says that packages need to be removed, nothing was changed: others are here that do the same, such as" \
			"docker-ce in the place of docker.io. Install the commands that are missing (--check names them) from where those" \
			"come from, or remove those yourself."
}

install_missing() {
	local packages
	mapfile -t packages < <(missing_packages "${NEEDED[@]}")
	if ((${#packages[@]} == 0)); then
		return
	fi
	begin_changes # whose lists tell what there is
	if ! candidate docker-cli >/dev/null; then
		mapfile -t packages < <(printf '%s\n' "${packages[@]/#docker-cli/docker.io}" | sort -u)
	fi
	install_packages "${packages[@]}"
}

# ---- Debian's archive, aside from the system's apt sources ----------------------------------------------------------

# Where this machine gets Debian from; else, as on Ubuntu, where mmdebstrap would.
debian_mirrors() {
	# shellcheck disable=SC2016 # the placeholder is apt's, not the shell's
	{
		apt-get indextargets --format '$(REPO_URI)' \
			'Created-By: Packages' 'Origin: Debian' 'Label: Debian' 'Component: main' 2>/dev/null || true
		sed -n "s/^ *my \$mirror *= '\(http[^']*\)';.*/\1/p" "$(command -v mmdebstrap)"
	} | sed 's:/*$::' | awk '!seen[$0]++'
}

# aside TYPE SUITE: fetches the lists of one suite of Debian into the temporary directory, where `apt-get -c
# "$ASIDE"` uses them and nothing else; the system's sources and lists stay as they are. Proxies, credentials
# and the like are the system's. The signature must verify, whatever the system's configuration allows.
ASIDE=''
aside() {
	local type=$1 suite=$2 mirror dir
	for mirror in $(debian_mirrors); do
		dir=$(mktemp -d "$WORK/aside.XXXXXX")
		chmod 755 "$dir"
		mkdir "$dir/lists" "$dir/cache"
		printf '%s [signed-by=%s] %s %s main\n' "$type" "$DEBIAN_KEYRING" "$mirror" "$suite" >"$dir/sources.list"
		ASIDE=$dir/apt.conf
		cat >"$ASIDE" <<-CONF
			Dir::Etc::sourcelist "$dir/sources.list";
			Dir::Etc::sourceparts "/dev/null";
			Dir::Etc::preferences "/dev/null";
			Dir::Etc::preferencesparts "/dev/null";
			Dir::State::lists "$dir/lists";
			Dir::Cache "$dir/cache";
			Acquire::AllowInsecureRepositories "false";
			Acquire::AllowWeakRepositories "false";
			APT::Get::AllowUnauthenticated "false";
			APT::Update::Error-Mode "any";
			#clear APT::Update::Post-Invoke;
			#clear APT::Update::Post-Invoke-Success;
		CONF
		quietly apt_get -c "$ASIDE" update && return
	done
	return 1
}

# ---- CRIU -----------------------------------------------------------------------------------------------------------

drop_trial_criu() {
	CRIU_ON_TRIAL=false
	if ! quietly apt_get purge criu; then
		echo "install-deps.sh: criu was installed to try it and could not be removed again: apt-get purge criu" >&2
		return 1
	fi
}

install_criu() {
	begin_changes
	if ! command -v criu >/dev/null && candidate criu >/dev/null; then
		step "trying the distribution's criu ($(candidate criu))"
		CRIU_ON_TRIAL=true
		if quietly apt_install criu && quietly criu_works criu; then
			CRIU_ON_TRIAL=false
			return
		fi
		drop_trial_criu || exit
	fi
	build_criu
}

build_criu() {
	local suite
	install_packages "${CRIU_BUILD[@]}"
	for suite in "${CRIU_SUITES[@]}"; do
		step "building criu from Debian $suite's source"
		build_criu_from "$suite" || continue
		hash -r
		criu_works criu >/dev/null ||
			die "$CRIU_TARGET works, but PATH finds $(command -v criu) first, which does not. Remove that or put ${CRIU_TARGET%/*} before it."
		return
	done
	die "no criu that works here could be had; the log says why. A kernel feature that 'criu check' names is missing in" \
		"this kernel; NO_PUBKEY asks for a newer debian-archive-keyring; for the rest, build CRIU 4.x by hand" \
		"(https://criu.org/Installation) and install it as $CRIU_TARGET."
}

# Only the upstream archive is taken; Debian's signed Sources index vouches for its SHA256. A subshell, for the cd.
build_criu_from() (
	local suite=$1 dir=$WORK/criu-$1 name sum version
	mkdir "$dir" && cd "$dir" || exit
	aside deb-src "$suite" || exit
	read -r name sum < <(apt-get -c "$ASIDE" source --print-uris --tar-only criu 2>>"$LOG" |
		sed -n "s/^'.*' \(criu_[^ ]*\.orig\.tar\.[a-z0-9]*\) .*SHA256:\([0-9a-f]\{64\}\)$/\1 \2/p") || exit
	version=${name#criu_}
	quietly dumps_sockets "${version%%.orig*}" || exit
	quietly apt_get -c "$ASIDE" source --download-only --tar-only criu || exit
	echo "$sum  $name" >SHA256SUMS
	quietly sha256sum -c SHA256SUMS || exit
	tar -xf "$name" --strip-components=1 --one-top-level=src || exit
	# By nftables, in the process, a dump locks the network 0.1 s sooner than by running iptables-restore.
	quietly make -C src -j"$(nproc)" NETWORK_LOCK_DEFAULT=NETWORK_LOCK_NFTABLES criu || exit
	quietly criu_works "$dir/src/criu/criu" || exit
	keep_libraries "$dir/src/criu/criu" || exit
	# Whole or not at all.
	mkdir -p "${CRIU_TARGET%/*}"
	install -m 755 src/criu/criu "$CRIU_TARGET.new" && mv -f "$CRIU_TARGET.new" "$CRIU_TARGET"
)

# Whoever removes the -dev packages must not lose the libraries along with them.
keep_libraries() {
	local files real packages
	mapfile -t files < <(ldd "$1" | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p')
	mapfile -t real < <(realpath "${files[@]}")
	# dpkg knows a library by its path before or after the merge of /lib into /usr.
	mapfile -t packages < <(dpkg-query -S "${files[@]}" "${real[@]}" 2>/dev/null | sed 's/: .*//' | sort -u)
	quietly apt-mark manual "${packages[@]}"
}

# ---- Go -------------------------------------------------------------------------------------------------------------

# A package's version, with or without epoch; the ~ lets 1.21~2 count as 1.21.
new_enough() { dpkg --compare-versions "${1#*:}" ge "1.$GO_MINOR~"; }

install_go() {
	local version
	begin_changes
	if version=$(candidate golang-go) && new_enough "$version"; then
		install_packages golang-go
	elif version=$(newest_versioned_go) && new_enough "$version"; then
		install_packages "golang-$version-go"
		link_go "/usr/lib/go-$version/bin"
	else
		install_go_backport
	fi
	hash -r
	go_is_enough || die "go is installed, but PATH finds an older one first: $(command -v go). Remove that one and run this again."
}

newest_versioned_go() {
	apt-cache search --names-only '^golang-1\.[0-9]+-go$' | sed 's/^golang-\([0-9.]*\)-go .*/\1/' | sort -V | tail -n 1 | grep .
}

# A package of one version (golang-1.23-go) puts nothing in PATH.
link_go() {
	local tool target
	for tool in go gofmt; do
		target=/usr/local/bin/$tool
		if [[ (-e $target || -L $target) && $(readlink "$target") != /usr/lib/go-* ]]; then
			die "$target is in the way of a link to $1/$tool: remove it and run this again."
		fi
		ln -sfn "$1/$tool" "$target"
	done
}

install_go_backport() {
	local codename
	# shellcheck source=/dev/null
	codename=$(. /etc/os-release && [[ $ID == debian ]] && echo "$VERSION_CODENAME") ||
		die "no Go 1.$GO_MINOR in this system's packages: install Go from https://go.dev/dl and run this again."
	step "installing golang-go from $codename-backports"
	if ! aside deb "$codename-backports" || ! quietly apt_install -c "$ASIDE" -t "$codename-backports" golang-go; then
		die "no Go 1.$GO_MINOR from $codename-backports, at least none that leaves all packages in place: install Go from https://go.dev/dl and run this again."
	fi
}

# ---- main -----------------------------------------------------------------------------------------------------------

main() {
	local mode=install
	while (($#)); do
		case $1 in
		--check) mode=check ;;
		--test) NEEDED+=("${ENGINES[@]}" "${IMAGES[@]}" "${TOOLS[@]}") ;;
		--bench) NEEDED+=("${ENGINES[@]}" "${IMAGES[@]}" "${TOOLS[@]}" "${BENCH[@]}") ;;
		--package) NEEDED+=("${PACKAGE[@]}") ;;
		--fresh) NEEDED+=("${FRESH[@]}") ;;
		--help | -h) usage && exit ;;
		*) printf 'install-deps.sh: unknown option: %s\n' "$1" >&2 && usage >&2 && exit 2 ;;
		esac
		shift
	done

	# su and cron leave these out.
	PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
	if [[ $mode == check ]]; then
		check "${NEEDED[@]}"
		exit
	fi
	command -v apt-get >/dev/null ||
		die "this is no apt system. Install by hand: ${NEEDED[*]#*:} busybox (static), Go 1.$GO_MINOR or newer, CRIU 4.x;" \
			"--check then says what is still missing."
	((EUID == 0)) || die "run this as root (sudo $0), or with --check to see what is missing."
	trap cleanup EXIT
	trap 'exit 130' INT
	trap 'exit 143' TERM

	install_missing
	install_missing # what those that were installed want besides
	go_is_enough || install_go
	criu_works criu >/dev/null || install_criu # last, as it is what a strange kernel can make impossible

	step "all there: $(runc --version | sed -n 1p), $(conmon --version | sed -n 1p), criu $(criu --version | sed -n 's/^Version: //p')"
}

main "$@"
