#!/usr/bin/env bash
# The main job, shown and proven: an agent works, is checkpointed, goes wrong
# and dies; restore brings back its files and its memory. Everything lives in
# a temporary root and is removed at the end; no service of this host has part in it.
set -euo pipefail
cd "$(dirname "$0")/.."

AGENTBOX_ROOT=$(realpath -- "$(mktemp -d "${TMPDIR:-/tmp}/agentbox-demo.XXXXXX")") # as the mount table names it
export AGENTBOX_ROOT AGENTBOX_HOST=none AGENTBOX_BACKEND=oci PATH="$PWD/bin:$PATH"
unset AGENTBOX_POLICY
port=${AGENTBOX_DEMO_PORT:-18473}
made=false # a sandbox, in this root

# removed: nothing is left of what the demo has made, however far it got.
removed() {
	local left
	if "$made"; then
		agentbox recover >/dev/null 2>&1 || true
		left=$(agentbox ps -a -q) || return 1
		[ -z "$left" ] || agentbox rm -f agent >/dev/null || return 1
	fi
	! grep -qF " $AGENTBOX_ROOT/" /proc/self/mountinfo
}

cleanup() {
	status=$?
	trap - EXIT
	if ! removed; then
		cat >&2 <<-TEXT
			demo: FAILED: its sandbox could not be removed, so all of it stays in $AGENTBOX_ROOT. To remove it:
			  export AGENTBOX_HOST=none AGENTBOX_ROOT=$AGENTBOX_ROOT
			  $PWD/bin/agentbox recover && $PWD/bin/agentbox rm -f agent
			  grep -F " $AGENTBOX_ROOT/" /proc/self/mountinfo || rm -rf --one-file-system $AGENTBOX_ROOT
		TEXT
		exit 1
	fi
	rm -rf --one-file-system -- "$AGENTBOX_ROOT"
	[ "$status" = 0 ] || echo "demo: FAILED" >&2
	exit "$status"
}
trap cleanup EXIT

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
show() {
	printf '$ %s\n' "$*"
	local t0 t1
	t0=$(date +%s%N)
	"$@"
	t1=$(date +%s%N)
	printf '  (%d ms)\n' $(((t1 - t0) / 1000000))
}
ask() { curl -sf --max-time 10 "http://127.0.0.1:$port$1"; }
field() { python3 -c 'import json,sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }
fail() {
	echo "demo: $*" >&2
	exit 1
}

# Everything that can be told about the upperdir, by programs that share no
# code with agentbox.
listing() {
	local upper
	upper=$(agentbox inspect agent | python3 -c 'import json,sys; print(json.load(sys.stdin)[0]["upperdir"])')
	(
		cd "$upper"
		find . -printf '%P|%y|%m|%U|%G|%T@|%s|%b|%l|%n\n' | LC_ALL=C sort
		find . -type f -print0 | LC_ALL=C sort -z | xargs -0 -r sha256sum
		find . -print0 | LC_ALL=C sort -z | xargs -0 -r getfattr -h -d -m - -e hex 2>/dev/null
	)
}

say "1. A sandbox over a Debian image"
rootfs=$(scripts/debian-image.sh)
show agentbox image import debian "$rootfs"
made=true
show agentbox run -d --name agent -w /work -p "127.0.0.1:$port:8000" -v "$PWD/scripts/demo-agent.py:/agent.py:ro" debian python3 /agent.py
for _ in $(seq 200); do
	turns=$(ask / 2>/dev/null | field turns 2>/dev/null) && [ "$turns" -ge 10 ] && break
	sleep 0.1
done
ask / || fail "the agent does not answer"
echo

say "2. Checkpoint: files and processes, in one frozen instant"
before=$(ask /rest) # the proof below needs files that stand still
echo "$before"
listing >"$AGENTBOX_ROOT/before"
show agentbox checkpoint agent --name good
ask /work >/dev/null
sleep 1
echo "and works on: $(ask / | field turns) turns"

say "3. The agent goes wrong: it damages its repository, plants malicious.py and dies"
ask /wreck || true
agentbox wait agent >/dev/null
agentbox ps -a
listing >"$AGENTBOX_ROOT/wrecked"
printf 'the upperdir differs in %d lines\n' "$(diff "$AGENTBOX_ROOT/before" "$AGENTBOX_ROOT/wrecked" | grep -c '^[<>]')"

say "4. Restore"
show agentbox restore agent good
listing >"$AGENTBOX_ROOT/after"
diff "$AGENTBOX_ROOT/before" "$AGENTBOX_ROOT/after" || fail "the upperdir is not what it was"
echo "the upperdir is equal in every entry: $(wc -l <"$AGENTBOX_ROOT/after") lines of names, types, modes, owners, times, sizes, blocks, links, digests, xattrs"
after=$(ask /) || fail "the agent does not answer after the restore"
echo "$after"
[ "$before" = "$after" ] || fail "the memory is not what it was"
agentbox exec agent sh -c 'test ! -e malicious.py && git fsck --no-progress && git status --short' || fail "the repository is damaged"
ask /work >/dev/null
for _ in $(seq 100); do
	[ "$(ask / | field turns)" -gt "$(field turns <<<"$before")" ] && break
	sleep 0.1
done
[ "$(ask / | field turns)" -gt "$(field turns <<<"$before")" ] || fail "the agent does not go on"
echo "the same memory, a sound repository, no malicious.py, and the agent goes on: $(ask / | field turns) turns"

say "5. What it took"
agentbox checkpoint ls agent
agentbox rm -f agent >/dev/null
echo
echo "demo: all proven"
