package setup

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestSystemd(t *testing.T) {
	dest := t.TempDir()
	opts := SystemdOptions{Program: "/opt/agentbox-1.2/bin/agentbox", Dest: dest, DryRun: true}
	set := func(want bool) SystemdResult {
		t.Helper()
		r, err := Systemd(t.Context(), opts)
		if err != nil || r.Changed != want || len(r.Files) != len(systemdFiles) {
			t.Fatalf("%+v, %v", r, err)
		}
		return r
	}
	r := set(true)
	if f := r.Files[3]; f.Path != filepath.Join(dest, "etc/systemd/system/agentbox.service") || !strings.Contains(f.Diff, "+ExecStart=/opt/agentbox-1.2/bin/agentbox serve\n") {
		t.Errorf("%+v", f)
	}
	if _, err := os.Stat(filepath.Join(dest, "etc")); !errors.Is(err, fs.ErrNotExist) {
		t.Error("a dry run wrote", err)
	}
	opts.DryRun = false
	set(true)
	set(false)

	// Another program, in the same place; what agentbox has made needs no backup.
	opts.Program = "/usr/local/bin/agentbox"
	r = set(true)
	if f := r.Files[3]; r.Files[0].Changed || r.Files[1].Changed || r.Files[2].Changed || f.Backup != "" || !strings.Contains(f.Diff, "-ExecStart=/opt/") {
		t.Errorf("%+v", r.Files)
	}
	data, err := os.ReadFile(r.Files[3].Path)
	if err != nil || strings.Count(string(data), "ExecStart=") != 1 || !strings.Contains(string(data), "\nExecStart=/usr/local/bin/agentbox serve\n") {
		t.Errorf("%v: %s", err, data)
	}

	// What somebody else has made stays, or is backed up.
	const theirs = "[Service]\nExecStart=/bin/true\n"
	unit := r.Files[3].Path
	if err := os.WriteFile(unit, []byte(theirs), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, remove := range []bool{false, true} {
		opts.Remove = remove
		if r, err := Systemd(t.Context(), opts); !errors.Is(err, fault.ErrExists) {
			t.Errorf("%+v, %v", r, err)
		}
	}
	opts.Remove, opts.Force = false, true
	r = set(true)
	if data, err := os.ReadFile(r.Files[3].Backup); err != nil || string(data) != theirs {
		t.Errorf("%+v: %s, %v", r.Files[3], data, err)
	}
	opts.Remove, opts.Force = true, false
	r = set(true)
	for _, f := range r.Files {
		if _, err := os.Lstat(f.Path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s stays: %v", f.Path, err)
		}
	}
	set(false)

	for _, p := range []string{"relative", "/with space/agentbox", "/a%b", "/a\nExecStartPre=/bin/x", `/a"b`, "/a$b"} {
		if r, err := Systemd(t.Context(), SystemdOptions{Program: p, Dest: dest}); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%q: %+v, %v", p, r, err)
		}
	}
	if r, err := Systemd(t.Context(), SystemdOptions{Program: filepath.Join(dest, "nope"), DryRun: true}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%+v, %v", r, err)
	}
}

// systemd itself reads the units, and has nothing to say about them.
func TestSystemdVerify(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Fatal("this test needs systemd-analyze (apt-get install systemd):", err)
	}
	verify := func(change func(*systemdSetup)) error {
		s := systemdSetup{SystemdOptions: SystemdOptions{Program: "/bin/true"}}
		if err := s.read(); err != nil {
			t.Fatal(err)
		}
		s.result.Changed = true
		change(&s)
		err := s.verify(t.Context())
		if len(s.result.Notes) > 0 {
			t.Error(s.result.Notes)
		}
		return err
	}
	if err := verify(func(*systemdSetup) {}); err != nil {
		t.Error(err)
	}
	for _, wrong := range [][2]string{{"KillMode=process", "KillMode=nonsense"}, {"ExecStart=/bin/true", "ExecStart=/nope/agentbox"}, {"Watchdog", "Watchdoc"}, {"Type=notify", "Type=socket"}} {
		err := verify(func(s *systemdSetup) {
			i := len(s.texts) - 1
			text := strings.Replace(string(s.texts[i]), wrong[0], wrong[1], 1)
			if text == string(s.texts[i]) {
				t.Fatal(wrong)
			}
			s.texts[i] = []byte(text)
		})
		if !errors.Is(err, fault.ErrUnsupported) {
			t.Errorf("%v: %v", wrong, err)
		}
	}
}
