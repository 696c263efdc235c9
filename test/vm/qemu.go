package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// emulator is a QEMU and how it is called.
type emulator struct {
	args  []string // the program and what comes first
	env   []string
	accel []string
}

// hostQEMU returns this host's QEMU if it is new enough: 7.2 crashes the guest.
func hostQEMU(ctx context.Context) (*emulator, string) {
	path, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		return nil, "this host has no qemu-system-x86_64"
	}
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	m := regexp.MustCompile(`version (\d+)`).FindSubmatch(out)
	if err != nil || m == nil {
		return nil, fmt.Sprintf("%s does not tell its version", path)
	}
	if v, _ := strconv.Atoi(string(m[1])); v < 10 {
		return nil, fmt.Sprintf("this host's QEMU is of version %d, and those before 10 crash the guest", v)
	}
	return &emulator{args: []string{path}}, ""
}

// debianQEMU returns the QEMU in a root filesystem of Debian's, run by that
// one's own loader: no chroot and no mount is needed.
func debianQEMU(root string) *emulator {
	lib := filepath.Join(root, "usr/lib/x86_64-linux-gnu")
	return &emulator{
		args: []string{filepath.Join(root, "lib64/ld-linux-x86-64.so.2"), "--library-path", lib,
			filepath.Join(root, "usr/bin/qemu-system-x86_64"),
			"-L", filepath.Join(root, "usr/share/qemu"), "-L", filepath.Join(root, "usr/share/seabios")},
		env: []string{"QEMU_MODULE_DIR=" + filepath.Join(lib, "qemu")},
	}
}

var (
	kvm = []string{"-accel", "kvm", "-cpu", "host"}
	tcg = []string{"-accel", "tcg,thread=multi", "-cpu", "Nehalem"}
)

// pickAccel sets KVM where a kernel says a word under it: that /dev/kvm opens and
// makes a CPU is no proof.
func (q *emulator) pickAccel(ctx context.Context, kernel string) string {
	q.accel = tcg
	if _, err := os.Stat("/dev/kvm"); err != nil {
		return "no KVM here: emulated, which is slow"
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	args := append(append([]string{}, q.args[1:]...), kvm...)
	args = append(args, "-machine", "q35", "-m", "512", "-nodefaults", "-no-user-config",
		"-display", "none", "-no-reboot",
		"-kernel", kernel, "-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1", "-serial", "stdio")
	cmd := exec.CommandContext(ctx, q.args[0], args...)
	cmd.Env = append(os.Environ(), q.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second
	out, err := cmd.StdoutPipe()
	if err != nil || cmd.Start() != nil {
		return "KVM cannot be tried: emulated"
	}
	works := false
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if bytes.Contains(lines.Bytes(), []byte("Linux version")) {
			works = true
			break
		}
	}
	cancel()
	_ = cmd.Wait()
	if !works {
		return "/dev/kvm is here, but no kernel boots by it: emulated, which is slow"
	}
	q.accel = kvm
	return "KVM works"
}

// errInterrupted is what ends a run that a signal ended.
var errInterrupted = errors.New("interrupted; the machine is off")

// machine is a guest that runs.
type machine struct {
	cmd     *exec.Cmd
	dir     string // of its disks
	console *console
	conn    net.Conn
	in      *bufio.Reader
	ended   chan struct{} // closed when QEMU has ended
	err     error         // how, once it has
	stderr  bytes.Buffer
}

type machineOptions struct {
	Images  string // directory with disk.img, vmlinuz and initrd
	Dir     string // for its own files: payload.img, work.img, what it writes
	Disk    string // in QEMU's format, above disk.img; empty: what is written to that is thrown away
	Console string // path of the log
	CPUs    int
	Memory  int // MB
	Boot    time.Duration
}

var (
	// errCrashed is an emulator that ended by a fault of its own.
	errCrashed = errors.New("QEMU crashed")
	// errHangs is a guest that does not come up.
	errHangs = errors.New("the guest was not up within")
	// errDisks is a host at fault.
	errDisks = errors.New("this host failed the machine's disks")
)

// boots is how often a guest is booted when QEMU crashes under it or it hangs, as happens
// now and then where it is emulated (the timer of a CPU never fires): nothing was run in
// it yet. One with a Disk of its own is not booted again when it hangs: that may be what
// lies on the disk, agentbox's service among it.
const boots = 3

// boot starts a guest and returns once it is ready for commands. The guest's changes go with it,
// except to a Disk of its own. ctx ends it.
func boot(ctx context.Context, q *emulator, opts machineOptions) (m *machine, ready string, err error) {
	for n := 1; ; n++ {
		m, ready, err = bootOnce(ctx, q, opts)
		again := (errors.Is(err, errCrashed) || errors.Is(err, errHangs) && opts.Disk == "") &&
			!errors.Is(err, errDisks)
		if n == boots || !again {
			return m, ready, err
		}
		fmt.Fprintf(os.Stderr, "%v\nit is booted again\n", err)
	}
}

func bootOnce(ctx context.Context, q *emulator, opts machineOptions) (_ *machine, ready string, err error) {
	sock := filepath.Join(opts.Dir, "port")
	root := "if=virtio,format=raw,cache=unsafe,snapshot=on,file=" + filepath.Join(opts.Images, "disk.img")
	if opts.Disk != "" {
		// Unsafe is what this host's end would make of it. The guest's flushes do put
		// in order what QEMU's end leaves; see overlay.
		root = "if=virtio,format=qcow2,cache=unsafe,file=" + opts.Disk
	}
	args := append(append([]string{}, q.args[1:]...), q.accel...)
	args = append(args, "-machine", "q35", "-smp", strconv.Itoa(opts.CPUs), "-m", strconv.Itoa(opts.Memory),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-nic", "none",
		"-kernel", filepath.Join(opts.Images, "vmlinuz"), "-initrd", filepath.Join(opts.Images, "initrd"),
		"-append", "root=LABEL=root rw console=ttyS0 panic=-1 quiet systemd.show_status=0 mitigations=off apparmor=1 security=apparmor",
		"-serial", "stdio",
		"-drive", root,
		"-drive", "if=virtio,format=raw,readonly=on,file="+filepath.Join(opts.Dir, "payload.img"),
		"-drive", "if=virtio,format=raw,cache=unsafe,discard=unmap,file="+filepath.Join(opts.Dir, "work.img"),
		"-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng",
		"-device", "virtio-serial", "-chardev", "socket,id=port,server=on,wait=off,path="+sock, "-device",
		"virtserialport,chardev=port,name=agentbox")
	m := &machine{dir: opts.Dir, ended: make(chan struct{})}
	m.cmd = exec.Command(q.args[0], args...)
	// A write that does not fit here is an error of the guest's disk: by default QEMU stops the
	// guest, without a word.
	for i, a := range m.cmd.Args {
		if strings.HasPrefix(a, "if=virtio,") {
			m.cmd.Args[i] += ",werror=report,rerror=report"
		}
	}
	// Its snapshots of disks have no name, and are gone with it.
	m.cmd.Env = append(append(os.Environ(), q.env...), "TMPDIR="+opts.Dir)
	m.cmd.Stderr = &m.stderr
	// QEMU ends however this program ends, and no Ctrl-C reaches QEMU itself.
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	if m.console, err = newConsole(opts.Console); err != nil {
		return nil, "", err
	}
	m.cmd.Stdout, m.cmd.WaitDelay = m.console, time.Second
	if err := m.cmd.Start(); err != nil {
		return nil, "", errors.Join(fmt.Errorf("start QEMU: %w", err), m.console.Close())
	}
	go func() {
		m.err = m.cmd.Wait()
		close(m.ended)
	}()
	defer func() {
		if err != nil {
			m.off()
		}
	}()
	ctx, cancel := context.WithTimeoutCause(ctx, opts.Boot, fmt.Errorf("%w %v", errHangs, opts.Boot))
	defer cancel()
	for m.conn == nil {
		if m.conn, err = net.Dial("unix", sock); err != nil {
			select {
			case <-time.After(50 * time.Millisecond):
			case <-m.ended:
				return nil, "", m.why(nil)
			case <-ctx.Done():
				return nil, "", m.why(context.Cause(ctx))
			}
		}
	}
	m.in = bufio.NewReader(m.conn)
	r, err := m.next(ctx)
	if err == nil && r.Ready == "" {
		err = errors.New("the guest's first word is not that it is ready")
	}
	return m, r.Ready, err
}

// run runs a command in the guest, and returns its exit code.
func (m *machine) run(ctx context.Context, req request, out io.Writer) (int, error) {
	limit := time.Duration(req.Seconds)*time.Second + time.Minute
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the guest did not answer for %v", limit))
	defer cancel()
	line, err := json.Marshal(req)
	if err != nil {
		return 0, err
	}
	if _, err := m.conn.Write(append(line, '\n')); err != nil {
		return 0, m.why(err)
	}
	for {
		r, err := m.next(ctx)
		if err != nil {
			return 0, err
		}
		if len(r.Out) > 0 {
			if _, err := out.Write(r.Out); err != nil {
				return 0, err
			}
		}
		if r.Ended && r.Err != "" {
			return 1, refused(r.Err)
		}
		if r.Ended {
			return r.Exit, nil
		}
	}
}

// next is the guest's next word, or why there will be none.
func (m *machine) next(ctx context.Context) (r reply, err error) {
	stop := context.AfterFunc(ctx, func() { _ = m.conn.SetReadDeadline(time.Now()) })
	defer stop()
	panicked := make(chan struct{})
	defer close(panicked)
	go func() {
		select {
		case <-m.console.panicked:
			// The console's next lines say where.
			time.Sleep(time.Second)
			_ = m.conn.SetReadDeadline(time.Now())
		case <-panicked:
		}
	}()
	line, err := m.in.ReadBytes('\n')
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return r, m.why(err)
	}
	return r, json.Unmarshal(line, &r)
}

// why says what became of a guest that does not answer.
func (m *machine) why(err error) error {
	select {
	case <-m.console.panicked:
		err = errors.New("the guest's kernel panicked")
	case <-m.ended:
		err = fmt.Errorf("QEMU ended: %v", m.cmd.ProcessState)
		if w, ok := m.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && w.Signaled() &&
			w.Signal() != syscall.SIGKILL && w.Signal() != syscall.SIGTERM {
			err = fmt.Errorf("%w: %v", errCrashed, m.cmd.ProcessState)
		}
		if said := strings.TrimSpace(m.stderr.String()); said != "" {
			err = fmt.Errorf("%w: %s", err, said)
		}
	case <-time.After(200 * time.Millisecond):
		if errors.Is(err, errInterrupted) {
			return err
		}
	}
	return fmt.Errorf("%w\nthe end of its console (all of it: %s):\n%s", errors.Join(m.diskFailed(), err),
		m.console.path, m.console.tail())
}

// diskFailed is an error once this host could not read or write what the guest's disks
// are made of: nothing that the guest comes to is to be believed.
func (m *machine) diskFailed() error {
	m.console.mu.Lock()
	defer m.console.mu.Unlock()
	if !m.console.ioError {
		return nil
	}
	free, err := freeMB(m.dir)
	return errors.Join(fmt.Errorf("%w, which are in %s, where %d MB are free; AGENTBOX_CACHE puts them elsewhere",
		errDisks, m.dir, free), err)
}

// off ends the guest. Nothing of it is worth an orderly end: its disks go, too.
func (m *machine) off() {
	_ = m.cmd.Process.Kill()
	<-m.ended
	if m.conn != nil {
		_ = m.conn.Close()
	}
	_ = m.console.Close()
}

// console keeps what the guest prints, and notices its kernel's panic.
type console struct {
	path     string
	panicked chan struct{}

	mu   sync.Mutex
	f    *os.File
	last []byte
	seen bool
	// ioError: the guest's kernel has told of an error of a disk that is QEMU's.
	ioError bool
}

func newConsole(path string) (*console, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err == nil {
		_, err = fmt.Fprintf(f, "==> a machine is booted, %s\n", time.Now().Format(time.DateTime))
	}
	return &console{path: path, f: f, panicked: make(chan struct{})}, err
}

func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = append(c.last, p...)
	c.last = c.last[max(0, len(c.last)-4<<10):]
	if !c.seen && bytes.Contains(c.last, []byte("Kernel panic - not syncing")) {
		c.seen = true
		close(c.panicked)
	}
	c.ioError = c.ioError || bytes.Contains(c.last, []byte("I/O error, dev vd"))
	return c.f.Write(p)
}

func (c *console) tail() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	lines := strings.Split(strings.TrimRight(strings.ReplaceAll(string(c.last), "\r", ""), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

func (c *console) Close() error { return c.f.Close() }
