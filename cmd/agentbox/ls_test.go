package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// listingOf is a directory with some of everything.
func listingOf(top string) *fakeService {
	f := boxes()
	file := func(path, kind, mode string, more runtime.FileEntry) runtime.FileEntry {
		more.Path, more.Type, more.Mode = path, kind, mode
		if more.Mtime == "" {
			more.Mtime = "2026-01-02T03:04:05.000006789Z"
		}
		return more
	}
	f.listed = []runtime.FileEntry{
		file(top, "dir", "0755", runtime.FileEntry{}),
		file(top+"/a b", "file", "4755", runtime.FileEntry{FileState: runtime.FileState{Size: 1234, UID: 7, GID: 8}}),
		file(top+"/d", "dir", "1777", runtime.FileEntry{Mount: "volume"}),
		file(top+"/d/<in>", "file", "0640", runtime.FileEntry{}),
		file(top+"/evil\n\x1b[31m", "fifo", "2644", runtime.FileEntry{FileState: runtime.FileState{Mtime: "-99\x1b"}}),
		file(top+"/l\uFFFD", "symlink", "0777", runtime.FileEntry{PathB64: "L2V0Yy9s/w==",
			FileState: runtime.FileState{Target: "to\x1b"}}),
		file(top+"/null", "char", "0666", runtime.FileEntry{FileState: runtime.FileState{Device: "1:3"}}),
	}
	return f
}

func TestLs(t *testing.T) {
	t.Setenv("TZ", "UTC")
	f := listingOf("/etc")
	const note = "warning: /etc/d is a mount (volume), whose content is not part of the checkpoint\n"
	r := try(t, f, "", "ls", "-R", "run@before", "etc")
	if r.code != 0 || r.stdout != "a b\nd\nd/<in>\n\"evil\\n\\x1b[31m\"\n\"l\\xff\"\nnull\n" || r.stderr != note {
		t.Errorf("%+v", r)
	}
	if !slices.Contains(f.calls, "List run@before /etc true") {
		t.Errorf("%q", f.calls)
	}
	if r := try(t, listingOf("/etc"), "", "ls", "run"); r.stderr != "" {
		t.Errorf("%+v", r)
	}
	r = try(t, listingOf("/etc"), "", "ls", "-l", "run@before", "/etc")
	for _, want := range []string{
		"-rwsr-xr-x         7:8         1234 2026-01-02 03:04:05 a b\n",
		"drwxrwxrwt         0:0            0 2026-01-02 03:04:05 d\n",
		"prw-r-Sr--         0:0            0                -99\uFFFD \"evil\\n\\x1b[31m\"\n",
		"lrwxrwxrwx         0:0            0 2026-01-02 03:04:05 \"l\\xff\" -> \"to\\x1b\"\n",
		"crw-rw-rw-         0:0          1:3 2026-01-02 03:04:05 null\n",
	} {
		if !strings.Contains(r.stdout, want) || r.code != 0 {
			t.Errorf("%s has no %q", r.stdout, want)
		}
	}
	r = try(t, listingOf("/etc"), "", "ls", "--format", "json", "run@before", "/etc")
	keys, first := keysOf(t, r, 0)
	if first["path"] != "/etc/a b" || first["mode"] != "4755" || first["uid"] != 7.0 ||
		!slices.Equal(keys, []string{"gid", "mode", "mtime", "path", "size", "type", "uid"}) ||
		!strings.Contains(r.stdout, "\"path\": \"/etc/d/<in>\"") || !strings.Contains(r.stdout, `"mount": "volume"`) {
		t.Errorf("%q: %+v", keys, r)
	}
	empty := boxes()
	try(t, empty, "", "ls", "--format", "json", "run").want(t, 0, "[]\n")
	one := boxes()
	one.listed = listingOf("/etc").listed[1:2]
	try(t, one, "", "ls", "run@before", "etc/a b").want(t, 0, "/etc/a b\n")

	for args, want := range map[string]string{
		"ls":               "'agentbox ps' lists sandboxes",
		"ls run@":          "names no checkpoint",
		"ls @before":       "SANDBOX is missing, and no sandbox has a workspace over",
		"cat @before:x":    "SANDBOX is missing",
		"cp @before:x y":   "SANDBOX is missing",
		"mount @before d":  "SANDBOX is missing",
		"ls @":             "names no checkpoint",
		"fork @x":          "SANDBOX is missing",
		"ls a b c":         "unexpected argument",
		"find a --type x":  "any",
		"find a --name [":  "not a pattern",
		"cat run":          "is not SANDBOX:PATH",
		"cat run:":         "the path is empty",
		"cat run@:/x":      "names no checkpoint",
		"cp x run@b:/x":    "a checkpoint cannot be changed",
		"cp run@:/x x":     "names no checkpoint",
		"cat run@before:d": "is a directory",
	} {
		r := try(t, boxes(), "", strings.Fields(args)...)
		if r.code != exitUsage || !strings.Contains(r.stderr, want) {
			t.Errorf("%s: %+v", args, r)
		}
	}
	if r := try(t, boxes(), "", "ls", "run", ""); r.code != exitUsage {
		t.Errorf("%+v", r)
	}
	for _, verb := range []string{"ls", "find"} {
		broken := listingOf("/etc")
		broken.fail["List"] = &runtime.Error{Op: "ls", ID: "run@before", Err: runtime.ErrCorrupt}
		r := try(t, broken, "", verb, "run@before")
		if r.code != exitCorrupt || !strings.HasPrefix(r.stderr, "agentbox: "+verb+" run@before: ") {
			t.Errorf("%+v", r)
		}
	}
}

func TestFind(t *testing.T) {
	f := listingOf("/etc")
	r := try(t, f, "", "find", "run@before", "/etc")
	if r.code != 0 || !strings.HasPrefix(r.stdout, "/etc\n/etc/a b\n") ||
		!strings.Contains(r.stderr, "/etc/d is a mount") {
		t.Errorf("%+v", r)
	}
	f = listingOf("/etc")
	if r = try(t, f, "", "find", "run@before", "--type", "f", "--name", "*[b>]"); r.code != 0 ||
		r.stdout != "/etc/a b\n/etc/d/<in>\n" || !slices.Contains(f.calls, "List run@before / true *[b>] file") {
		t.Errorf("%+v, %q", r, f.calls)
	}
	r = try(t, listingOf("/etc"), "", "find", "-0", "run", "/etc", "--type", "p")
	if r.code != 0 || r.stdout != "/etc/evil\n\x1b[31m\x00" {
		t.Errorf("%+v", r)
	}
}

func TestCat(t *testing.T) {
	try(t, boxes(), "", "cat", "run@before:/d/f", "run:d/f").want(t, 0, "hihi")
	if r := try(t, boxes(), "", "cat", "run@before:/nope"); r.code != exitNotFound ||
		!strings.HasPrefix(r.stderr, "agentbox: ") {
		t.Errorf("%+v", r)
	}
	f := boxes()
	f.fail["CopyFrom"] = &runtime.Error{Op: "cp", ID: "run@before", Err: runtime.ErrCorrupt}
	if r := try(t, f, "", "cat", "run@before:/d/f"); r.code != exitCorrupt ||
		!strings.HasPrefix(r.stderr, "agentbox: cat run@before: ") {
		t.Errorf("%+v", r)
	}
}

// A checkpoint is copied from without asking for the sandbox, which may be gone.
func TestCopyOutOfCheckpoint(t *testing.T) {
	host(t)
	f := boxes()
	if r := try(t, f, "", "cp", "gone@before:/d", "new"); r.code != 0 || !slices.Contains(walk(t), "new/f") {
		t.Errorf("%+v", r)
	}
}
