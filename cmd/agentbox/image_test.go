package main

import (
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/images/image"
)

func TestImageVerbs(t *testing.T) {
	for _, c := range []struct {
		line   string
		call   string
		stdout string
	}{
		{"image pull debian", "PullImage debian always  false 0", "sha256:pulled\n"},
		{
			"image pull --policy missing --platform linux/arm64 --insecure --max-size 2g x",
			"PullImage x missing linux/arm64 true 2147483648", "sha256:pulled\n",
		},
		{"image push app", "PushImage app  false", "sha256:pushed\n"},
		{"image push --insecure app oci:/x", "PushImage app oci:/x true", "sha256:pushed\n"},
		{"image tag a b", "TagImage a b", ""},
		{"image prune", "PruneImages false", "sha256:gone\n1 image removed, 2kB freed\n"},
		{"image prune --all --force", "PruneImages true", "sha256:gone\n1 image removed, 2kB freed\n"},
		{"image verify a b", "VerifyImage a", "a\nb\n"},
		{"image verify", "VerifyImage busybox", "busybox\n"},
		{
			"commit -a me -m why -c x -c y run@before img",
			"Commit run@before img me why [x y] -62135596800", "sha256:made\n",
		},
	} {
		f := boxes()
		r := try(t, f, "", strings.Fields(c.line)...)
		if r.code != 0 || r.stdout != c.stdout || !strings.Contains(strings.Join(f.calls, "\n"), c.call) {
			t.Errorf("%s: %d %q %q; %q", c.line, r.code, r.stdout, r.stderr, f.calls)
		}
	}
	r := try(t, boxes(), "", "image", "history", "x")
	if want := "second"; r.code != 0 || strings.Index(r.stdout, want) > strings.Index(r.stdout, "first") {
		t.Errorf("%d %q", r.code, r.stdout)
	}
	t.Setenv("SOURCE_DATE_EPOCH", "1000")
	f := boxes()
	try(t, f, "", "commit", "run", "img").want(t, 0, "sha256:made\n", "warning: a socket")
	if !strings.Contains(strings.Join(f.calls, "\n"), "[] 1000") {
		t.Errorf("%q", f.calls)
	}
	t.Setenv("SOURCE_DATE_EPOCH", "never")
	try(t, f, "", "commit", "run", "img").want(t, exitUsage, "", "SOURCE_DATE_EPOCH")
	try(t, f, "", "image", "prune", "--all").want(t, exitUsage, "", "--force")
	try(t, f, "", "image", "login", "r").want(t, exitUsage, "", "--password-stdin")
	try(t, f, "", "image", "login", "--password-stdin", "r").want(t, exitUsage, "", "--username")
	try(t, f, "", "image", "pull", "--max-size", "x", "r").want(t, exitUsage, "", "--max-size")
}

func TestLayerBars(t *testing.T) {
	var out strings.Builder
	b := &layerBars{w: &out, width: 60, begun: time.Now()}
	b.pull(image.Progress{Entries: 5}) // an import's
	for i := range 10 {
		b.pull(image.Progress{
			Layer: "sha256:" + strings.Repeat(string(rune('a'+i)), 64), Stage: image.StagePulling,
			Done: 5e6, Total: 10e6,
		})
	}
	b.push(image.SourceProgress{Digest: "sha256:there", There: true, Total: 7e6})
	lines := b.text(time.Second)
	if len(lines) != mostBars+2 || lines[0] != "sha256:aaaaaaaaaaaa [===============>              ] 5MB" ||
		lines[mostBars] != "and 2 more" ||
		lines[mostBars+1] != "1 of 11 layers, 57MB of 107MB, 57MB/s" {
		t.Errorf("%q", lines)
	}
	b.end()
	b.end()
	if s := out.String(); strings.Count(s, "\x1b[J") != 1 || !strings.HasSuffix(s, "\x1b[J") {
		t.Errorf("%q", s)
	}
}
