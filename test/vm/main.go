// Command vm runs the tests in a virtual machine: a Debian 13 with systemd,
// cgroup v2, AppArmor and every capability, as users have it and as few build
// machines do. It is what `make test-vm` runs.
//
// The host makes the machine's disk (scripts/vm-image.sh), compiles the test
// binaries, puts them with the sources they read on a second disk, boots QEMU,
// and has the guest run one suite after the other over a port of virtio-serial.
// What comes back is ordinary output of tests, and lies under bin/vm as
// test2json's events; the machine ends with this program, however that ends.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	goruntime "runtime"
	"slices"
	"syscall"
	"time"
)

// QEMU is to end with the thread that started it: the main one, which ends last.
func init() { goruntime.LockOSThread() }

type options struct {
	suites  []string
	image   string
	run     string
	list    bool
	verbose bool
	long    bool
	resume  bool
	accel   string
	cpus    int
	memory  int
	command string
	timeout time.Duration
	cuts    int
}

func main() {
	err := func() error {
		if filepath.Base(os.Args[0]) == "go" {
			return goCommand(os.Args[1:])
		}
		if len(os.Args) == 3 && os.Args[1] == "guest" {
			return guest(os.Args[2])
		}
		ctx, cancel := context.WithCancelCause(context.Background())
		defer cancel(nil)
		signals := make(chan os.Signal, 1)
		signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
		go func() {
			<-signals
			cancel(errInterrupted)
		}()
		return host(ctx, os.Args[1:])
	}()
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "test-vm:", err)
		os.Exit(1)
	}
}

func parse(args []string) (o options, err error) {
	f := flag.NewFlagSet("vm", flag.ContinueOnError)
	f.Usage = func() {
		fmt.Fprintf(f.Output(), "usage: go run ./test/vm [flags] [suite ...]\n\nRuns suites of tests in a Debian 13 machine; all, if none is named.\n\n")
		f.PrintDefaults()
	}
	f.StringVar(&o.image, "image", images[0].name, "the `name` of what it boots: "+imageNames())
	f.StringVar(&o.run, "run", "", "only tests that match this `regexp`")
	f.BoolVar(&o.list, "list", false, "list the suites and the images, and end")
	f.BoolVar(&o.verbose, "v", false, "the output of all tests as it comes, not only of those that fail")
	f.BoolVar(&o.long, "long", false, "all that can be tried, as make test-long")
	f.BoolVar(&o.resume, "resume", false,
		"go on with a run that was cut off: suites that have passed are not run again while all that they are made of is the same")
	f.StringVar(&o.accel, "accel", "auto", "`auto`, kvm or tcg (emulated)")
	f.IntVar(&o.cpus, "cpus", 2, "CPUs of the machine")
	f.IntVar(&o.memory, "memory", 4096, "its memory in `MB`")
	f.DurationVar(&o.timeout, "timeout", 0, "the most that one suite may take (default 30m, emulated 3h)")
	f.IntVar(&o.cuts, "cuts", 3, "how many times the suite test/systemd cuts the power, each followed by a boot")
	f.StringVar(&o.command, "command", "", "instead of suites, run this `shell command` in the machine")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	o.suites = f.Args()
	if !slices.ContainsFunc(images, func(i image) bool { return i.name == o.image }) {
		return o, fmt.Errorf("there is no image %q, but %s", o.image, imageNames())
	}
	if !slices.Contains([]string{"auto", "kvm", "tcg"}, o.accel) {
		return o, fmt.Errorf("--accel is auto, kvm or tcg, not %q", o.accel)
	}
	if _, err := regexp.Compile(o.run); err != nil {
		return o, err
	}
	return o, nil
}

func host(ctx context.Context, args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	list, err := chosen(o.suites)
	if err != nil {
		return err
	}
	if o.list {
		for _, s := range list {
			fmt.Println(s.pkg)
		}
		fmt.Println()
		for _, i := range images {
			fmt.Printf("-image %-10s %s\n", i.name, i.has)
		}
		return nil
	}
	if o.command != "" && len(o.suites) == 0 {
		list = nil
	}
	results, err := filepath.Abs("bin/vm")
	if err != nil {
		return err
	}
	if _, err := os.Stat("go.mod"); err != nil {
		return errors.New("run this at the top of the tree")
	}
	if err := os.MkdirAll(results, 0o755); err != nil {
		return err
	}
	q, lacks := hostQEMU(ctx)
	boots, unlock, err := makeImages(ctx, o.image, q == nil)
	if err != nil {
		return err
	}
	defer unlock()
	if q == nil {
		fmt.Fprintf(os.Stderr, "%s: Debian 13's is used\n", lacks)
		q = debianQEMU(filepath.Join(filepath.Dir(boots), "qemu-trixie"))
	}
	switch o.accel {
	case "auto":
		fmt.Fprintln(os.Stderr, q.pickAccel(ctx, filepath.Join(boots, "vmlinuz")))
	case "kvm":
		q.accel = kvm
	case "tcg":
		q.accel = tcg
	}
	dir, done, err := scratch(filepath.Dir(boots))
	if err != nil {
		return err
	}
	defer done()
	rec := record{dir: results}
	if rec.digests, err = makePayload(ctx, dir, list, o, fmt.Sprint(filepath.Base(boots), q.accel)); err != nil {
		return err
	}
	var before []result
	todo := list
	if o.resume {
		before, todo = rec.split(list)
	}
	if len(todo) > 0 || o.command != "" {
		if err := makeDisks(ctx, dir); err != nil {
			return err
		}
	}
	bound, usual := 4*time.Minute, 3*time.Hour // of each of its tries
	if q.accel[1] == "kvm" {
		bound, usual = 2*time.Minute, 30*time.Minute
	}
	o.timeout = cmp.Or(o.timeout, usual)
	console := filepath.Join(results, "console.log") // of all boots of this run
	if err := os.WriteFile(console, nil, 0o644); err != nil {
		return err
	}
	opts := machineOptions{Images: boots, Dir: dir, Console: console, CPUs: o.cpus, Memory: o.memory, Boot: bound}
	all, facts, err := runSuites(ctx, q, opts, todo, o, rec)
	if err != nil || o.command != "" {
		return err
	}
	for _, s := range todo {
		if s.boots && ctx.Err() == nil {
			r := runBoots(ctx, q, opts, s, o, rec)
			fmt.Println(r)
			all, facts = append(all, r), cmp.Or(facts, r.facts)
		}
	}
	for _, r := range before {
		facts = cmp.Or(facts, r.facts)
	}
	all = append(before, all...)
	if err := verdict(os.Stdout, list, all, facts, o.run); err != nil {
		return fmt.Errorf("%w; all output is in %s", err, results)
	}
	return nil
}

// runSuites runs, in one machine, the command or all suites that need none of
// their own.
func runSuites(
	ctx context.Context, q *emulator, opts machineOptions, list []suite, o options, rec record,
) (all []result, facts string, err error) {
	list = slices.DeleteFunc(slices.Clone(list), func(s suite) bool { return s.boots })
	if len(list) == 0 && o.command == "" {
		return nil, "", nil
	}
	fmt.Fprintf(os.Stderr, "booting (the bound is %v)\n", opts.Boot)
	begun := time.Now()
	m, facts, err := boot(ctx, q, opts)
	if err != nil {
		return nil, "", err
	}
	defer m.off()
	fmt.Fprintf(os.Stderr, "up after %.0f s\n", time.Since(begun).Seconds())
	if o.command != "" {
		code, err := m.run(ctx, request{
			Args: []string{"sh", "-c", o.command}, Env: environment(o), Dir: "/root", Seconds: int(o.timeout.Seconds()),
		}, os.Stdout)
		if err == nil && code != 0 {
			err = fmt.Errorf("the command ended with %d", code)
		}
		if err == nil || alive(m) {
			err = errors.Join(err, m.diskFailed())
		}
		return nil, facts, err
	}
	for _, s := range list {
		r := m.runSuite(ctx, s, o, rec, facts)
		fmt.Println(r)
		all = append(all, r)
		if ctx.Err() != nil {
			break
		}
		if !alive(m) {
			fmt.Fprintln(os.Stderr, "that machine is off: suites after this one are not run in it")
			break
		}
	}
	return all, facts, nil
}

func alive(m *machine) bool {
	select {
	case <-m.ended:
		return false
	default:
		return true
	}
}

// environment is what tests and commands in the guest have.
func environment(o options) []string {
	env := []string{
		"AGENTBOX_VM=1", "HOME=/root", "PATH=/payload/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
	}
	if o.long {
		env = append(env, "AGENTBOX_LONG=1")
	}
	return env
}

// runSuite runs one suite in the guest, and keeps its events and that it has passed.
func (m *machine) runSuite(ctx context.Context, s suite, o options, rec record, facts string) result {
	begun := time.Now()
	kept, err := rec.begin(s)
	if err != nil {
		return result{suite: s, err: err}
	}
	defer kept.Close()
	r := m.runTests(ctx, s, o.run, nil, o, kept)
	r.took = time.Since(begun)
	return rec.end(r, facts)
}

// runTests runs tests of a suite in the guest, and adds their events to what is kept.
func (m *machine) runTests(
	ctx context.Context, s suite, which string, env []string, o options, kept io.Writer,
) (r result) {
	r.suite = s
	args := []string{
		s.binary(payload), "-test.v=test2json", "-test.paniconexit0", "-test.timeout=" + o.timeout.String(),
	}
	if which != "" {
		args = append(args, "-test.run="+which)
	}
	args = append(args, s.args...)
	// It ends with what it reads, and not by a Ctrl-C in the middle of a line.
	convert := exec.Command("go", "tool", "test2json", "-t", "-p", modulePath+"/"+s.pkg)
	convert.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	in, err := convert.StdinPipe()
	if err != nil {
		r.err = err
		return r
	}
	events, err := convert.StdoutPipe()
	if err != nil {
		r.err = err
		return r
	}
	if r.err = convert.Start(); r.err != nil {
		return r
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	tallied := make(chan error)
	go func() {
		err := r.tally(io.TeeReader(events, kept), os.Stdout, o.verbose)
		if unkept := err != nil && !errors.Is(err, errBound); unkept {
			cancel(errUnkept) // runs nothing whose results are not kept
			_, _ = io.Copy(io.Discard, events)
		}
		tallied <- err
	}()
	code, err := m.run(ctx, request{
		Args: args, Env: append(environment(o), env...), Dir: filepath.Join(payload, "src", s.pkg),
		Seconds: int(o.timeout.Seconds()) + 30,
	}, in)
	_ = in.Close()
	r.err = errors.Join(<-tallied, err, convert.Wait())
	_, ended := errors.AsType[refused](err)
	lost := err != nil && !ended
	if failed := m.diskFailed(); failed != nil && !lost { // else err tells
		r.err, lost = errors.Join(r.err, failed), true
	}
	if lost {
		// Its processes would be in the next suite's way, and its output in that one's.
		m.off()
	}
	if code != 0 && r.failed == 0 && r.err == nil {
		r.err = fmt.Errorf("it ended with %d", code)
	}
	if r.err != nil {
		// Without it the events end as if more were to come.
		enc := json.NewEncoder(kept)
		r.err = errors.Join(r.err, enc.Encode(event{
			Action: "output", Package: modulePath + "/" + s.pkg, Output: r.err.Error() + "\n",
		}),
			enc.Encode(event{Action: "fail", Package: modulePath + "/" + s.pkg}))
	}
	return r
}
