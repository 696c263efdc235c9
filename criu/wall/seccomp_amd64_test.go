package wall_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/seccomp"
	profile "github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/criu/criutest"
	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/criu/wall"
	"github.com/agentbox/agentbox/criu/wall/walltest"
)

// The numbers of calls are those of package unix.
func TestCalls(t *testing.T) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys").Output()
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skip("no Go here: ", err)
	}
	for entry, arch := range map[string]string{"X86_64": "amd64", "X86": "386"} {
		data, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(out)), "unix", "zsysnum_linux_"+arch+".go"))
		must(t, err)
		calls, n := wall.Calls()[entry], 0
		for _, m := range regexp.MustCompile(`SYS_([A-Z0-9_]+)\s+= (\d+)`).FindAllStringSubmatch(string(data), -1) {
			number, err := strconv.ParseUint(m[2], 10, 32)
			must(t, err)
			if name := strings.ToLower(m[1]); name != "arch_specific_syscall" {
				if n++; calls[uint32(number)] != name {
					t.Errorf("%s: %d is %s, here %q", entry, number, name, calls[uint32(number)])
				}
			}
		}
		if n < 380 || n != len(calls) {
			t.Errorf("%s: %d calls, here %d", entry, n, len(calls))
		}
	}
}

// ours is the filter that a container of ours has.
func ours(t testing.TB, s *specs.Spec) *specs.LinuxSeccomp {
	t.Helper()
	if s == nil {
		s = &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{}}, Linux: &specs.Linux{}}
	}
	f, err := profile.GetDefaultProfile(s)
	must(t, err)
	f.DefaultErrnoRet = nil
	return f
}

// filteredBy replaces the filter of a spec.
func filteredBy(t testing.TB, images string, f *specs.LinuxSeccomp) *wall.Spec {
	t.Helper()
	path := filepath.Join(filepath.Dir(images), "config.json")
	data, err := os.ReadFile(path)
	must(t, err)
	s := &specs.Spec{}
	must(t, json.Unmarshal(data, s))
	s.Linux.Seccomp = f
	data, err = json.Marshal(s)
	must(t, err)
	must(t, os.WriteFile(path, data, 0o600))
	spec, err := wall.Read(filepath.Dir(images))
	must(t, err)
	return spec
}

func filtersOf(t testing.TB, images string) []*seccomp.SeccompFilter {
	t.Helper()
	list, err := walltest.Entries(filepath.Join(images, "seccomp.img"))
	must(t, err)
	e := &seccomp.SeccompEntry{}
	must(t, proto.Unmarshal(list[0], e))
	return e.GetSeccompFilters()
}

// Another engine's filter lets calls through that ours refuses. They are refused by one that is laid
// over it, and the kernel takes that.
func TestLaidFilter(t *testing.T) {
	images, _ := archived(t)
	spec := filteredBy(t, images, ours(t, nil))
	had := filtersOf(t, images)
	begin := time.Now()
	must(t, wall.Judge(images, spec, ""))
	t.Logf("%d filters judged in %v", len(had), time.Since(begin))
	now := filtersOf(t, images)
	if len(now) != len(had)+1 || now[len(had)].GetPrev() != uint32(len(had)-1) {
		t.Fatalf("%d filters, were %d", len(now), len(had))
	}
	before := readAll(t, images)
	must(t, wall.Judge(images, spec, ""))
	for name, data := range readAll(t, images) {
		if !bytes.Equal(before[name], data) {
			t.Errorf("%s was written anew twice", name)
		}
	}
	own := filepath.Join(t.TempDir(), "filter")
	must(t, os.WriteFile(own, now[len(had)].GetFilter(), 0o600))
	cmd := exec.Command(os.Args[0], "filtered")
	cmd.Env = append(os.Environ(), "FILTER="+own)
	out, err := cmd.CombinedOutput()
	if want := "getpid: errno 0\nunshare: operation not permitted\nkeyctl: operation not permitted\nunknown: function not implemented\n"; err != nil || string(out) != want {
		t.Errorf("%v: %s, want %s", err, out, want)
	}
	if n := len(now[len(had)].GetFilter()) / 8; n > 600 {
		t.Errorf("it has %d instructions", n)
	}
}

func init() { holds["filtered"] = tryFiltered }

// tryFiltered has the kernel put a filter over itself, and calls it.
func tryFiltered() error {
	data, err := os.ReadFile(os.Getenv("FILTER"))
	if err != nil {
		return err
	}
	program := make([]unix.SockFilter, len(data)/8)
	for i := range program {
		b := data[8*i:]
		program[i] = unix.SockFilter{
			Code: uint16(b[0]) | uint16(b[1])<<8, Jt: b[2], Jf: b[3],
			K: uint32(b[4]) | uint32(b[5])<<8 | uint32(b[6])<<16 | uint32(b[7])<<24,
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	if err := install(program); err != nil {
		return err
	}
	for _, c := range []struct {
		name   string
		number uintptr
	}{{"getpid", unix.SYS_GETPID}, {"unshare", unix.SYS_UNSHARE}, {"keyctl", unix.SYS_KEYCTL}, {"unknown", 1000}} {
		_, _, no := unix.Syscall(c.number, 0, 0, 0)
		fmt.Printf("%s: %v\n", c.name, no)
	}
	os.Exit(0)
	return nil
}

// A restored process cannot do what a forged filter allows; calls that the container's own filter
// has refused are refused as before.
func TestLaidFilterRestored(t *testing.T) {
	for name, forge := range map[string]bool{"own": false, "own, native calls alone": false, "forged": true} {
		t.Run(name, func(t *testing.T) {
			b := criutest.New(t, []string{
				"sh", "-c", "echo x >/f; i=0; while :; do i=$((i+1)); chmod 600 /f 2>/dev/null && echo \"$i can\" >/is || echo \"$i cannot\" >/is; sleep 0.05; done",
			}, func(s *specs.Spec) {
				f := ours(t, s)
				for i := range f.Syscalls {
					f.Syscalls[i].Names = slices.DeleteFunc(f.Syscalls[i].Names, func(n string) bool {
						return strings.Contains(n, "chmod")
					})
				}
				if name == "own, native calls alone" {
					f.Architectures = nil
				}
				s.Linux.Seccomp = f
			})
			must(t, os.Symlink("busybox", filepath.Join(b.Files, "bin", "chmod")))
			b.Start(nil)
			is := func() string {
				data, _ := os.ReadFile(filepath.Join(b.Files, "is"))
				return string(data)
			}
			b.Until("it tries", func() bool { return strings.Contains(is(), "can") })
			if out, err := b.Do("checkpoint", "--file-locks", "--image-path", b.Images, "--work-path",
				b.Work, b.ID); err != nil {
				t.Fatalf("checkpoint: %v: %s", err, out)
			}
			had := len(filtersOf(t, b.Images))
			if forge {
				must(t, walltest.Weaken(b.Images))
			}
			spec, err := wall.Read(b.Bundle)
			must(t, err)
			must(t, wall.Judge(b.Images, spec, ""))
			if now := len(filtersOf(t, b.Images)); (now != had) != forge {
				t.Errorf("%d filters, were %d", now, had)
			}
			must(t, os.WriteFile(filepath.Join(b.Files, "is"), nil, 0o600))
			cmd := b.Cmd(nil, "restore", "--detach", "--file-locks", "--bundle", b.Bundle, "--image-path", b.Images,
				"--work-path", b.Work, b.ID)
			cmd.Env = host.Environ()
			if err := cmd.Run(); err != nil {
				log, _ := os.ReadFile(filepath.Join(b.Work, "restore.log"))
				t.Fatalf("restore: %v: %s", err, log)
			}
			b.Until("it tries again", func() bool { return strings.Contains(is(), "can") })
			if strings.Contains(is(), "can\n") || !strings.Contains(is(), "cannot") {
				t.Errorf("it %s", is())
			}
		})
	}
}

func BenchmarkFilters(b *testing.B) {
	images, _ := archived(b)
	spec := filteredBy(b, images, ours(b, nil))
	must(b, wall.Judge(images, spec, ""))
	for b.Loop() {
		must(b, wall.Judge(images, spec, ""))
	}
}
