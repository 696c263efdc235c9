//go:build soak

package test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
)

// The parameters of the soak; a shorter time than it takes ends it early, and the table says how
// far it came. SOAK_ALIVE, SOAK_CLIENTS and SOAK_CYCLES change it, for a trial on a machine that
// has other work.
var (
	soakAlive   = soakNumber("SOAK_ALIVE", 200)
	soakClients = soakNumber("SOAK_CLIENTS", 32)
	soakCycles  = int64(soakNumber("SOAK_CYCLES", 1000))
)

func soakNumber(name string, usual int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n > 0 {
		return n
	}
	return usual
}

// soakSocket is set for a client of the soak, which is this program once more.
const soakSocket = "AGENTBOX_SOAK_SOCKET"

func init() {
	if socket := os.Getenv(soakSocket); socket != "" {
		soakClient(socket, os.Args[1])
	}
}

// soakClient runs cycles, and reports each, until it is killed or its caller has gone. Its
// sandboxes then go with its lease, which is its process's.
func soakClient(socket, name string) {
	c := api.Dial(socket)
	lease, err := c.CreateLease(context.Background(), runtime.LeaseRequest{
		Name: "soak-" + name, LeaseTerms: runtime.LeaseTerms{Owner: runtime.OwnerPid},
	})
	if err != nil {
		fmt.Printf("0 lease: %v\n", err)
		os.Exit(1)
	}
	for n := 0; ; n++ {
		start := time.Now()
		err := leasedCycle(context.Background(), c, fmt.Sprintf("soak-%s-%d", name, n), lease.ID)
		if _, e := fmt.Printf("%d %v\n", time.Since(start).Milliseconds(), err); e != nil {
			os.Exit(0)
		}
		if err != nil {
			time.Sleep(time.Second)
		}
	}
}

// soak is one run.
type soak struct {
	*box
	service int // its pid
	client  *api.Client

	cycles, kills atomic.Int64
	mu            sync.Mutex
	failed        map[string]int
	took          []time.Duration // of cycles
	ps            []time.Duration
	rss           []int64 // KiB, a look a second
	load          []int64 // of the machine over a minute, in hundredths
}

// TestSoak is what `make soak` runs: a service with 200 sandboxes, and 32 clients
// that run, checkpoint, restore and remove others and are killed at random.
// SOAK=10m bounds its time; its figures are a table on the standard output and in
// the file that SOAK_TABLE names.
func TestSoak(t *testing.T) {
	limit, err := time.ParseDuration(os.Getenv("SOAK"))
	if err != nil {
		t.Fatalf("SOAK=%q: %v", os.Getenv("SOAK"), err)
	}
	s := &soak{box: newBox(t), failed: map[string]int{}}
	// In a session of its own, as under systemd, and so are clients, as those of different
	// users are: the kernel shares the processors out by session.
	s.serveAttr = &syscall.SysProcAttr{Setsid: true}
	cmd, socket := s.serve()
	s.service, s.client = cmd.Process.Pid, api.Dial(socket)
	began := time.Now()
	s.fill()
	filled := time.Since(began)
	idle := s.memory()
	say("%d sandboxes alive after %v, the service has %d MiB", soakAlive, filled.Round(time.Second), idle>>10)
	// The first of each kind makes what stays.
	lease, err := s.client.CreateLease(t.Context(), runtime.LeaseRequest{
		Name: "first", LeaseTerms: runtime.LeaseTerms{For: time.Hour},
	})
	if err == nil {
		err = leasedCycle(t.Context(), s.client, "first", lease.ID)
	}
	if err == nil {
		_, err = s.client.ReleaseLease(t.Context(), lease.ID)
	}
	if err != nil {
		t.Fatal(err)
	}
	cpu := s.reconcileCost()
	before := s.held()

	// An interrupt ends it early: the service, in its own session, does not get it.
	asked, stop := signal.NotifyContext(t.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(asked, limit)
	defer cancel()
	began = time.Now()
	var all sync.WaitGroup
	all.Go(func() { s.sample(ctx) })
	for i := range soakClients {
		all.Go(func() { s.keepClient(ctx, i) })
	}
	for next := 30 * time.Second; ctx.Err() == nil && s.cycles.Load() < soakCycles; time.Sleep(100 * time.Millisecond) {
		if lasted := time.Since(began); lasted > next {
			next = lasted + 30*time.Second
			s.mu.Lock()
			say("%v: %d of %d cycles, %d clients killed, ps of the last %d: p99 %v; the service has %d MiB",
				lasted.Round(time.Second), s.cycles.Load(), soakCycles, s.kills.Load(),
				min(100, len(s.ps)), percentile(s.ps[max(0, len(s.ps)-100):],
					0.99).Round(time.Millisecond), s.memory()>>10)
			s.mu.Unlock()
		}
	}
	cancel()
	all.Wait()
	lasted := time.Since(began)

	// Leftovers of killed clients go with their leases.
	left := 0
	ours := func(sb runtime.Sandbox) bool { return strings.HasPrefix(sb.Name, "soak-") }
	list, err := s.client.Sandboxes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range list {
		if ours(sb) {
			left++
		}
	}
	say("ended after %v; %d sandboxes of the last clients, which were killed, are being removed with their leases",
		lasted.Round(time.Second), left)
	waited := time.Now()
	for len(list) > soakAlive && time.Since(waited) < 2*time.Minute {
		time.Sleep(500 * time.Millisecond)
		if list, err = s.client.Sandboxes(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	freed := time.Since(waited)
	for _, sb := range list {
		if ours(sb) {
			t.Errorf("the lease of %s has ended, and it is there: %s", sb.Name, sb.Status)
		}
	}
	list2, err := s.client.Checkpoints(t.Context(), runtime.CheckpointFilter{All: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, ck := range list2 {
		if err := s.client.RemoveCheckpoint(t.Context(), ck.ID); err != nil && !errors.Is(err, runtime.ErrNotFound) { // leases remove theirs
			t.Error(err)
		}
	}
	report, err := s.client.Reconcile(t.Context())
	if err != nil {
		t.Error(err)
	}
	for _, f := range report.Findings {
		t.Logf("found by the last recover: %+v", f)
	}
	var leaks []string
	s.eventually("all that the cycles made is gone, or named", func() bool {
		leaks = newlyThere(before, s.held())
		return len(leaks) == 0 || time.Since(began) > lasted+30*time.Second
	})
	gone := newlyThere(s.held(), before)
	for _, l := range leaks {
		t.Errorf("leaked: %s", l)
	}
	for _, g := range gone {
		t.Errorf("harmed: %s", g)
	}
	s.table(t, lasted, idle, cpu, left, freed, len(leaks), len(gone), report)
}

// say prints at once how far it is; t.Logf would keep that back to the end of the run.
func say(format string, args ...any) {
	fmt.Printf("soak: "+format+"\n", args...)
}

// fill makes the sandboxes that live all the time.
func (s *soak) fill() {
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for n := i; n < soakAlive; n += 4 {
				sb, err := s.client.Create(s.Context(), runtime.CreateRequest{Spec: runtime.Spec{
					Name: fmt.Sprintf("alive-%d", n), Image: "busybox", Args: []string{"sleep", "100000"},
					Network: runtime.Network{Mode: runtime.NetworkNone},
				}})
				if err == nil {
					_, err = s.client.Start(s.Context(), sb.ID, nil)
				}
				if err != nil {
					s.Errorf("alive-%d: %v", n, err)
					return
				}
			}
		})
	}
	all.Wait()
	if s.Failed() {
		s.FailNow()
	}
}

// keepClient has one client at work all the time, and kills it now and then.
func (s *soak) keepClient(ctx context.Context, i int) {
	for gen := 0; ctx.Err() == nil; gen++ {
		cmd := exec.Command(os.Args[0], fmt.Sprintf("%d-%d", i, gen))
		cmd.Env = append(os.Environ(), soakSocket+"="+filepath.Join(s.root, "run", api.SocketName),
			"GOMAXPROCS=1", "GOGC=50")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			s.Errorf("client: %v", err)
			return
		}
		// Some live through several cycles, others not through one.
		life := time.Duration(5+rand.IntN(120)) * time.Second
		done := make(chan struct{})
		go func() {
			defer close(done)
			for lines := bufio.NewScanner(out); lines.Scan(); {
				ms, text, _ := strings.Cut(lines.Text(), " ")
				n, _ := strconv.Atoi(ms)
				s.mu.Lock()
				if text == "<nil>" {
					s.cycles.Add(1)
					s.took = append(s.took, time.Duration(n)*time.Millisecond)
				} else {
					s.failed[text]++
				}
				s.mu.Unlock()
			}
		}()
		select {
		case <-time.After(life):
			s.kills.Add(1)
		case <-ctx.Done():
		}
		_ = cmd.Process.Kill()
		<-done
		_ = cmd.Wait()
	}
}

// sample asks for the list of sandboxes four times a second, and looks at the
// service's memory.
func (s *soak) sample(ctx context.Context) {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		start := time.Now()
		list, err := s.client.Sandboxes(ctx)
		took := time.Since(start)
		if ctx.Err() != nil {
			return
		}
		if err != nil || len(list) < soakAlive {
			s.Errorf("ps: %d sandboxes, %v", len(list), err)
			return
		}
		s.mu.Lock()
		s.ps = append(s.ps, took)
		if n%4 == 0 {
			s.rss = append(s.rss, s.memory())
			s.load = append(s.load, loadAverage())
		}
		s.mu.Unlock()
	}
}

// loadAverage is the machine's over a minute, in hundredths.
func loadAverage() int64 {
	text, _ := os.ReadFile("/proc/loadavg")
	var n float64
	_, _ = fmt.Sscanf(string(text), "%f", &n) // 0: not known
	return int64(n * 100)
}

// memory is the service's resident set in KiB.
func (s *soak) memory() int64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.service))
	for line := range strings.Lines(string(text)) {
		var n int64
		if _, err := fmt.Sscanf(line, "VmRSS: %d kB", &n); err == nil {
			return n
		}
	}
	return 0
}

// reconcileCost is the processor time of `agentbox recover` where all is well,
// less what the program takes for itself.
func (s *soak) reconcileCost() time.Duration {
	cost := func(args ...string) time.Duration {
		best := time.Hour
		for range 5 {
			cmd := s.command(s.Context(), args...)
			cmd.Env = append(cmd.Env, "AGENTBOX_HOST=none")
			if out, err := cmd.CombinedOutput(); err != nil {
				s.Fatalf("%v: %s", err, out)
			}
			best = min(best, cmd.ProcessState.SystemTime()+cmd.ProcessState.UserTime())
		}
		return best
	}
	return cost("recover") - cost("version")
}

// held is all that the host has of the root: mounts, cgroups, namespaces, processes, records,
// files. The store's chunks and its own bookkeeping are left to prune, and the audit log to its
// owner.
func (s *soak) held() map[string]bool {
	set := map[string]bool{}
	for _, list := range [][]string{mountsUnder(s.root), s.netLeft()} {
		for _, what := range list {
			set[what] = true
		}
	}
	for _, p := range processesOf(s.root) {
		if !strings.Contains(p, "serve") && !strings.Contains(p, os.Args[0]) {
			set[p] = true
		}
	}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(path, "/agentbox/") {
			for _, id := range s.ids() {
				if strings.HasPrefix(d.Name(), id) {
					set["cgroup "+path] = true
				}
			}
			return filepath.SkipDir
		}
		return nil
	})
	list, err := s.client.Sandboxes(context.Background())
	if err != nil {
		s.Error(err)
	}
	for _, sb := range list {
		set[fmt.Sprintf("sandbox %s %s pid %d", sb.Name, sb.Status, sb.Pid)] = true
		if ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", sb.Pid)); err == nil {
			set["namespace "+ns] = true
		}
	}
	_ = filepath.WalkDir(s.root, func(path string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(s.root, path)
		switch {
		case err != nil:
			return nil
		case rel == "packs" || rel == "run/requests" || rel == "run/exits" || rel == "locks" || rel == "audit" ||
			d.IsDir() && d.Name() == "merged":
			return fs.SkipDir
		case strings.HasPrefix(rel, "state.db") || strings.HasPrefix(rel, "audit."):
			return nil
		}
		set["file "+rel] = true
		return nil
	})
	return set
}

func percentile(list []time.Duration, p float64) time.Duration {
	if len(list) == 0 {
		return 0
	}
	list = slices.Sorted(slices.Values(list))
	return list[min(len(list)-1, int(p*float64(len(list))))]
}

func mean(list []int64) (m int64) {
	for _, n := range list {
		m += n
	}
	return m / max(1, int64(len(list)))
}

func (s *soak) table(
	t *testing.T, lasted time.Duration, idle int64, cpu time.Duration, left int, freed time.Duration, leaks, harmed int,
	report runtime.ReconcileReport,
) {
	quarter := len(s.rss) / 4
	second, last, most := mean(s.rss[quarter:2*quarter]), mean(s.rss[3*quarter:]), slices.Max(append(s.rss, 0))
	failures := 0
	for text, n := range s.failed {
		t.Errorf("%d cycles failed: %s", n, text)
		failures += n
	}
	p99 := percentile(s.ps, 0.99)
	var out strings.Builder
	row := func(what, format string, args ...any) {
		fmt.Fprintf(&out, "| %s | %s |\n", what, fmt.Sprintf(format, args...))
	}
	out.WriteString("| | |\n| --- | --- |\n")
	row("time", "%v", lasted.Round(time.Second))
	row("processors; the machine's load average, the mean of it", "%d; %.1f", goruntime.NumCPU(),
		float64(mean(s.load))/100)
	row("sandboxes alive all the time", "%d", soakAlive)
	row("clients, killed at random", "%d, %d kills", soakClients, s.kills.Load())
	row("cycles (run, write, checkpoint, change, restore, prove, rm)", "%d, %d failed", s.cycles.Load(), failures)
	row("a cycle, median and p99", "%v, %v", percentile(s.took, 0.5), percentile(s.took, 0.99))
	row("`ps` of all, median, p99 and most", "%v, %v, %v (%d times)", percentile(s.ps, 0.5).Round(time.Millisecond),
		p99.Round(time.Millisecond), percentile(s.ps, 1).Round(time.Millisecond), len(s.ps))
	row("memory of the service with the sandboxes alone, at most, means of the second and the last quarter",
		"%d, %d, %d, %d MiB", idle>>10, most>>10, second>>10, last>>10)
	row("sandboxes of the last clients, killed together, and the time until all had gone with their leases", "%d, %v",
		left, freed.Round(time.Second))
	row("found by the last `recover`", "%d", len(report.Findings))
	row("leaked (mounts, cgroups, namespaces, processes, rows, files)", "%d", leaks)
	row("harmed of what lived all the time", "%d", harmed)
	row("processor time of one `recover` where all is well", "%v", cpu)
	t.Logf("\n%s", out.String())
	if path := os.Getenv("SOAK_TABLE"); path != "" {
		if err := os.WriteFile(path, []byte(out.String()), 0o644); err != nil {
			t.Error(err)
		}
	}
	err := errors.Join(
		unless(s.cycles.Load() >= soakCycles, "%d cycles of %d in the time", s.cycles.Load(), soakCycles),
		unless(p99 < 100*time.Millisecond, "p99 of ps is %v", p99),
		unless(most < 150<<10, "the service had %d MiB", most>>10),
		unless(last < second+second/4, "its memory grew from %d to %d MiB", second>>10, last>>10),
		unless(cpu < 200*time.Millisecond, "recover takes %v where all is well", cpu),
	)
	if err != nil {
		t.Errorf("not met:\n%v", err)
	}
}

func unless(ok bool, format string, args ...any) error {
	if ok {
		return nil
	}
	return fmt.Errorf(format, args...)
}
