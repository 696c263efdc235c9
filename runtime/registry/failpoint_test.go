//go:build failpoint

package registry

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

// TestBreak breaks off at every point, in three ways, and then does it again.
func TestBreak(t *testing.T) {
	for _, point := range []string{
		"registry.push.before-pack", "registry.push.before-tag", "registry.pull.after-pack",
		"registry.pull.before-remove",
	} {
		for _, action := range []string{"error", "enospc", "kill"} {
			t.Run(point+"="+action, func(t *testing.T) {
				s, o := serve(t), fast(t)
				src := sample(7, 20, 2000)
				pulls := strings.Contains(point, "pull")
				if pulls {
					mustPush(t, s.Host()+"/web:one", src, about(id1), o)
				}
				cmd := exec.Command(os.Args[0], "-test.run=^TestBreakChild$")
				cmd.Env = append(os.Environ(), "AGENTBOX_FAILPOINT="+point+"="+action, "CHILD_HOST="+s.Host(),
					"CHILD_SCRATCH="+o.Scratch)
				if pulls {
					cmd.Env = append(cmd.Env, "CHILD_PULLS=1")
				}
				out, err := cmd.CombinedOutput()
				if err == nil || action != "kill" && !strings.Contains(string(out), point) {
					t.Fatalf("the point was not hit: %v\n%s", err, out)
				}
				if !pulls {
					if _, err := Pull(t.Context(), s.Host()+"/web:one", newMemory().begin,
						o); !errors.Is(err, fault.ErrNotFound) {
						t.Fatalf("half a push shows: %v", err)
					}
					if action != "kill" {
						empty(t, o.Scratch)
					}
					s.Forget()
					mustPush(t, s.Host()+"/web:one", src, about(id1), o)
					if up := s.Requests("POST"); point == "registry.push.before-tag" && len(up) != 0 {
						t.Errorf("what was there is pushed again: %q", up)
					}
				}
				s.Forget()
				dst := newMemory()
				if _, err := Pull(t.Context(), s.Host()+"/web:one", dst.begin, o); err != nil {
					t.Fatal(err)
				}
				src.same(t, dst)
				d := s.artifact(t, "web", "one").packs[0].pack
				if gets := s.Requests("GET /v2/web/blobs/" + d.Digest.String()); pulls && len(gets) != 0 {
					t.Errorf("what was there is fetched again: %q", gets)
				}
			})
		}
	}
}

func TestBreakChild(t *testing.T) {
	host := os.Getenv("CHILD_HOST")
	if host == "" {
		return
	}
	o := Options{Scratch: os.Getenv("CHILD_SCRATCH")}
	var err error
	if os.Getenv("CHILD_PULLS") != "" {
		_, err = Pull(t.Context(), host+"/web:one", newMemory().begin, o)
	} else {
		_, err = Push(t.Context(), host+"/web:one", sample(7, 20, 2000), about(id1), o)
	}
	if err != nil {
		t.Fatal(err)
	}
}
