package main

import (
	"reflect"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for line, want := range map[string]call{
		// As conmon, containerd-shim and Docker call it.
		"create --bundle /b --pid-file /p c1": {
			verb: "create", id: "c1", flags: map[string]string{"bundle": "/b", "pid-file": "/p"},
		},
		"--root /r --log /l --log-format json create --bundle /b --pid-file /p --console-socket /s c1": {
			globals: []string{"--root", "/r", "--log", "/l", "--log-format", "json"}, root: "/r",
			log: "/l", logJSON: true,
			verb: "create", id: "c1", flags: map[string]string{
				"bundle": "/b", "pid-file": "/p", "console-socket": "/s",
			}},
		"--root=/r --systemd-cgroup create -b /b --no-pivot --no-new-keyring c1": {
			globals: []string{"--root=/r", "--systemd-cgroup"}, root: "/r",
			verb: "create", id: "c1", flags: map[string]string{
				"bundle": "/b", "no-pivot": "true", "no-new-keyring": "true",
			}},
		"-root /r -debug start c1": {
			globals: []string{"-root", "/r", "-debug"}, root: "/r", verb: "start", id: "c1", flags: map[string]string{},
		},
		"--rootless true delete -f c1": {
			globals: []string{"--rootless", "true"}, verb: "delete", id: "c1", flags: map[string]string{"f": "true"},
		},
		"--new-flag=1 start c1": {
			globals: []string{"--new-flag=1"}, verb: "start", id: "c1", flags: map[string]string{},
		},
		"create --preserve-fds 2 start": {verb: "create", id: "start", flags: map[string]string{"preserve-fds": "2"}},
		"--criu create start c1": {
			globals: []string{"--criu", "create"}, verb: "start", id: "c1", flags: map[string]string{},
		},
		"delete c1 --force": {verb: "delete", id: "c1", flags: map[string]string{}},
		"--root /r --log /l --log-format=json create --no-mount-fallback --pidfd-socket /s --bundle /b c1": {
			globals: []string{"--root", "/r", "--log", "/l", "--log-format=json"}, root: "/r", log: "/l", logJSON: true,
			verb: "create", id: "c1", flags: map[string]string{
				"bundle": "/b", "no-mount-fallback": "true", "pidfd-socket": "/s",
			}},
		"--root /r exec --process /p.json --detach --pid-file /p c1": {
			globals: []string{"--root", "/r"}, root: "/r", verb: "exec", id: "c1",
			flags: map[string]string{"process": "/p.json", "detach": "true", "pid-file": "/p"}},
		"exec -d -p /p.json --console-socket /s -t c1": {
			verb: "exec", id: "c1", flags: map[string]string{
				"process": "/p.json", "d": "true", "console-socket": "/s", "t": "true",
			},
		},
		"exec -u 1:2 c1 create x -d": {verb: "exec", id: "c1", flags: map[string]string{"u": "1:2"}},
		"delete -- c1":               {verb: "delete", id: "c1", flags: map[string]string{}},
		"create --bundle= --pid-file=/p c": {
			verb: "create", id: "c", flags: map[string]string{"bundle": "", "pid-file": "/p"},
		},
	} {
		got, ok := parse(strings.Fields(line))
		if want.globals == nil {
			want.globals = []string{}
		}
		if !ok || !reflect.DeepEqual(got, want) {
			t.Errorf("parse(%q) = %+v, %v\n\twant %+v", line, got, ok, want)
		}
	}
	for _, line := range []string{
		"", "--version", "--help", "list", "state c1", "exec", "exec --unknown 1 c1 true", "--unknown create c1",
		"create --unknown c1", "create",
		"create a b", "create a --bundle b", "start", "start a b", "delete", "delete a b", "--root", "create --bundle",
		"kill c1 KILL", "features",
	} {
		if got, ok := parse(strings.Fields(line)); ok {
			t.Errorf("parse(%q) = %+v, want no understanding", line, got)
		}
	}
}
