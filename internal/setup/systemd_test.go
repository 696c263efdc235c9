package setup

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/dist/systemd"
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
	if f := r.Files[3]; f.Path != filepath.Join(dest, "etc/systemd/system/agentbox.service") ||
		!strings.Contains(f.Diff, "+ExecStart=/opt/agentbox-1.2/bin/agentbox serve\n") {
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
	if f := r.Files[3]; r.Files[0].Changed || r.Files[1].Changed || r.Files[2].Changed || f.Backup != "" ||
		!strings.Contains(f.Diff, "-ExecStart=/opt/") {
		t.Errorf("%+v", r.Files)
	}
	data, err := os.ReadFile(r.Files[3].Path)
	if err != nil || strings.Count(string(data), "ExecStart=") != 1 ||
		!strings.Contains(string(data), "\nExecStart=/usr/local/bin/agentbox serve\n") {
		t.Errorf("%v: %s", err, data)
	}

	// An edited file is backed up, whether it is replaced or removed.
	edited := append(data, "Environment=PROXY=http://proxy\n"...)
	for _, remove := range []bool{false, true} {
		if err := os.WriteFile(r.Files[3].Path, edited, 0o644); err != nil {
			t.Fatal(err)
		}
		opts.Remove = remove
		r := set(true)
		f := r.Files[3]
		if data, err := os.ReadFile(f.Backup); err != nil || !bytes.Equal(data, edited) {
			t.Errorf("%+v: %s, %v", f, data, err)
		}
		for _, f := range r.Files[:3] {
			if f.Backup != "" {
				t.Errorf("%+v", f)
			}
		}
	}
	opts.Remove = false
	set(true)
	// The program may be any, and nothing else.
	for line, want := range map[string]bool{
		"ExecStart=/usr/bin/agentbox serve\n": true, "ExecStart=/x serve\n": true,
		"ExecStart=/x --root /y serve\n": false,
		"ExecStart=/x serve --prune 0\n": false, "ExecStart=/x serve\nExecStop=/y serve\n": false,
		"ExecStart=x serve\n": false, "": false,
	} {
		text, err := systemd.Files.ReadFile("agentbox.service")
		if err != nil {
			t.Fatal(err)
		}
		if got := isOurs(text, bytes.Replace(text, []byte("ExecStart=/usr/bin/agentbox serve\n"),
			[]byte(line), 1)); got != want {
			t.Errorf("with %q it is ours: %v", line, got)
		}
	}

	// A file that setup did not make stays, or is backed up.
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
	if r, err := Systemd(t.Context(), SystemdOptions{
		Program: filepath.Join(dest, "nope"), DryRun: true,
	}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%+v, %v", r, err)
	}
}

// Only units of setup's own are disabled, and those of a package take over.
func TestSystemdRemoved(t *testing.T) {
	for name, c := range map[string]struct {
		have   []string // whose units are there
		show   string   // what systemd has for each name afterwards
		want   string
		others bool
	}{
		"all": {
			[]string{"agentbox.socket", "agentbox.service"}, "",
			"disable --now agentbox.socket agentbox.service\ndaemon-reload\n", false,
		},
		"beside a package": {
			[]string{"agentbox.socket", "agentbox.service"}, "/usr/lib/systemd/system/$5",
			"disable --now agentbox.socket agentbox.service\ndaemon-reload\nenable agentbox.socket agentbox.service\nstart agentbox.socket agentbox.service\n", true,
		},
		"one of them": {
			[]string{"agentbox.service"}, "/usr/lib/systemd/system/$5",
			"disable --now agentbox.service\ndaemon-reload\nenable agentbox.socket agentbox.service\nstart agentbox.socket agentbox.service\n", true,
		},
		"only the package's": {nil, "/usr/lib/systemd/system/$5", "daemon-reload\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			said := filepath.Join(dir, "said")
			script := "#!/bin/sh\nif [ \"$1\" = show ]; then echo \"" + c.show +
				"\"; else echo \"$*\" >>" + said + "; fi\n"
			if err := os.WriteFile(filepath.Join(dir, "systemctl"), []byte(script), 0o700); err != nil {
				t.Fatal(err)
			}
			t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
			s := systemdSetup{SystemdOptions: SystemdOptions{Dest: dir, Remove: true}}
			for _, name := range c.have {
				path := filepath.Join(dir, "etc/systemd/system", name)
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
					os.WriteFile(path, []byte(systemdMark), 0o644)); err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(s.read(), s.disable(t.Context()), s.tell(t.Context())); err != nil {
				t.Fatal(err)
			}
			if got, err := os.ReadFile(said); err != nil || string(got) != c.want || s.result.Others != c.others ||
				(len(s.result.Notes) > 0) != c.others {
				t.Errorf("%v: %q, want %q; %+v", err, got, c.want, s.result)
			}
		})
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
	for _, wrong := range [][2]string{
		{"KillMode=process", "KillMode=nonsense"}, {"ExecStart=/bin/true", "ExecStart=/nope/agentbox"},
		{"Watchdog", "Watchdoc"}, {"Type=notify", "Type=socket"},
	} {
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
