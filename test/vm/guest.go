package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// request is a command for the guest, one line of JSON.
type request struct {
	Args    []string `json:"args"`
	Env     []string `json:"env,omitempty"`
	Dir     string   `json:"dir,omitempty"`
	Seconds int      `json:"seconds"` // after which it is ended
}

// reply is what comes back, a line each: first Ready, then per command its
// output in parts, and its end.
type reply struct {
	Ready string `json:"ready,omitempty"` // what the guest is
	Out   []byte `json:"out,omitempty"`
	Ended bool   `json:"ended,omitempty"`
	Exit  int    `json:"exit,omitempty"`
	Err   string `json:"err,omitempty"`
}

// refused is why the guest did not run a command to its end. It takes the next one.
type refused string

func (r refused) Error() string { return string(r) }

// payload is where the second disk is mounted in the guest.
const payload = "/payload"

// guest is what the machine's unit runs: it does what the host asks for, one
// command after the other, until the host closes the port.
func guest(port string) error {
	f, err := os.OpenFile(port, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	// There is no network, but a machine of Debian's names a resolver.
	if old, err := os.ReadFile("/etc/resolv.conf"); err == nil && len(old) == 0 {
		if err := os.WriteFile("/etc/resolv.conf", []byte("nameserver 192.0.2.53\n"), 0o644); err != nil {
			return err
		}
	}
	out := &replies{enc: json.NewEncoder(f)}
	if err := out.send(reply{Ready: facts()}); err != nil {
		return err
	}
	for in := bufio.NewScanner(f); in.Scan(); {
		var req request
		if err := json.Unmarshal(in.Bytes(), &req); err != nil {
			return fmt.Errorf("a request that is none: %w", err)
		}
		exit, err := out.run(req)
		end := reply{Ended: true, Exit: exit}
		if err != nil {
			end.Err = err.Error()
		}
		if err := out.send(end); err != nil {
			return err
		}
	}
	return nil
}

// replies is the way back to the host.
type replies struct {
	sync.Mutex
	enc *json.Encoder
}

func (r *replies) send(m reply) error {
	r.Lock()
	defer r.Unlock()
	return r.enc.Encode(m)
}

func (r *replies) Write(p []byte) (int, error) { return len(p), r.send(reply{Out: p}) }

// run runs a command to its end, or ends it and what it has started.
func (r *replies) run(req request) (exit int, err error) {
	cmd := exec.Command(req.Args[0], req.Args[1:]...)
	cmd.Dir, cmd.Env = req.Dir, append(os.Environ(), req.Env...)
	cmd.Stdout, cmd.Stderr = r, r
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// Processes that tests left running may hold its output open.
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	limit := time.AfterFunc(time.Duration(req.Seconds)*time.Second, func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	})
	err = cmd.Wait()
	if !limit.Stop() {
		return 0, fmt.Errorf("ended after %d s, which is its bound", req.Seconds)
	}
	var bad *exec.ExitError
	if errors.As(err, &bad) {
		return max(bad.ExitCode(), 1), nil
	}
	return 0, err
}

// facts names what the guest has, by its own word.
func facts() string {
	var list []string
	for _, c := range [][]string{
		{"uname", "-r"}, {"systemctl", "--version"}, {"runc", "--version"}, {"criu", "--version"},
		{"conmon", "--version"}, {"dockerd", "--version"}, {"containerd", "--version"}, {"podman", "--version"},
		{"stat", "-fc", "cgroups: %T", "/sys/fs/cgroup"}, {"cat", "/sys/module/apparmor/parameters/enabled"},
	} {
		cmd := exec.Command(c[0], c[1:]...)
		out, err := cmd.Output()
		first, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
		if err != nil {
			first = c[0] + ": " + err.Error()
		}
		if strings.HasSuffix(c[len(c)-1], "enabled") {
			first = "apparmor: " + first
		}
		list = append(list, first)
	}
	return strings.Join(list, "\n")
}

// goCommand stands in for the go command in the guest, where there is no Go: what
// tests have built lies in the payload, built by the host.
func goCommand(args []string) error {
	if len(args) == 0 || args[0] != "build" {
		return fmt.Errorf("in this machine go only builds what was built before, not %q", args)
	}
	var out, tags string
	var what []string
	for i := 1; i < len(args); i++ {
		switch a := args[i]; a {
		case "-o", "-tags", "-ldflags":
			i++
			if i == len(args) {
				return fmt.Errorf("%s has no value", a)
			}
			if a == "-o" {
				out = args[i]
			} else if a == "-tags" {
				tags = args[i]
			}
		default:
			what = append(what, a)
		}
	}
	here, err := os.Getwd()
	if err != nil {
		return err
	}
	info, err := os.Stat(out)
	into := strings.HasSuffix(out, "/") || err == nil && info.IsDir()
	for _, w := range what {
		pkg, err := packageOf(here, w)
		if err != nil {
			return err
		}
		to := out
		if into {
			to = filepath.Join(out, filepath.Base(pkg))
		}
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil { // as go does
			return err
		}
		if err := copyFile(filepath.Join(payload, "built", tags, pkg), to); err != nil {
			return fmt.Errorf("%s with tags %q was not built for this machine (see builds in test/vm): %w", w, tags,
				err)
		}
	}
	return nil
}

// packageOf is the path of a package in the module, by its name from a
// directory of the guest's copy.
func packageOf(here, name string) (string, error) {
	if rest, ok := strings.CutPrefix(name, modulePath+"/"); ok {
		return rest, nil
	}
	rel, err := filepath.Rel(filepath.Join(payload, "src"), filepath.Join(here, name))
	if err != nil || slices.Contains(strings.Split(rel, "/"), "..") {
		return "", fmt.Errorf("%s is no package of the module", name)
	}
	return rel, nil
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
