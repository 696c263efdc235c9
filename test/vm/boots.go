package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// machines boots machines that share a disk: what one of them has written the
// next one finds, as far as it had reached the disk.
type machines struct {
	q      *emulator
	opts   machineOptions
	o      options
	suite  suite
	kept   io.Writer // its events
	result result
}

// runBoots runs a suite that reboots its machine and cuts its power: the tests
// are the suite's, their order and what comes between is here.
func runBoots(ctx context.Context, q *emulator, opts machineOptions, s suite, o options, rec record) (r result) {
	b := &machines{q: q, opts: opts, o: o, suite: s, result: result{suite: s}}
	begun := time.Now()
	defer func() {
		r.took = time.Since(begun)
		r = rec.end(r, r.facts)
	}()
	kept, err := rec.begin(s)
	if err != nil {
		b.result.err = err
		return b.result
	}
	defer kept.Close()
	b.kept = kept
	b.opts.Disk = filepath.Join(opts.Dir, "disk.qcow2")
	b.opts.Boot = boots * opts.Boot // in one try
	asked := func(part string) bool { return asksFor(o.run, part) }
	if asked("TestPackage") {
		err = b.apart(ctx, "TestPackage")
	}
	if slices.ContainsFunc([]string{"TestInstall", "TestService", "TestReboot", "TestPowerCut"}, asked) {
		err = errors.Join(err, b.parts(ctx, asked))
	}
	b.result.err = errors.Join(b.result.err, err)
	return b.result
}

// asksFor reports whether a -run asks for a part of a suite that reboots.
func asksFor(run, part string) bool { return regexp.MustCompile(topLevel(run)).MatchString(part) }

// fresh gives the machines that are booted from now on a disk with which nothing was done yet.
func (b *machines) fresh() error {
	return overlay(b.opts.Disk, filepath.Join(b.opts.Images, "disk.img"))
}

// apart runs a test in a machine that has nothing of the others, and leaves them nothing.
func (b *machines) apart(ctx context.Context, name string) error {
	if err := b.fresh(); err != nil {
		return err
	}
	m, err := b.up(ctx)
	if err != nil {
		return err
	}
	defer m.off()
	b.tests(ctx, m, name)
	return nil
}

// parts runs those that are asked for and share a disk, in one machine after the other.
func (b *machines) parts(ctx context.Context, asked func(string) bool) error {
	if err := b.fresh(); err != nil {
		return err
	}
	m, err := b.up(ctx)
	defer func() {
		if m != nil {
			m.off()
		}
	}()
	if err != nil {
		return err
	}
	// Without the package there is nothing to try.
	if !b.tests(ctx, m, "TestInstall") {
		return nil
	}
	if asked("TestService") {
		b.tests(ctx, m, "TestService")
	}
	if asked("TestReboot") && b.tests(ctx, m, "TestBeforeReboot") {
		if err := m.reboot(ctx, b.opts.Boot); err != nil {
			return err
		}
		m.off()
		if m, err = b.up(ctx); err != nil {
			return err
		}
		b.tests(ctx, m, "TestAfterReboot")
	}
	if !asked("TestPowerCut") {
		return nil
	}
	for w, n, well := newWork(), 1, true; n <= b.o.cuts && well; n++ {
		said, err := b.cut(ctx, m, w, []string{"checkpoint", "restore", "prune"}[n%3])
		m.off()
		if err != nil {
			return fmt.Errorf("before cut %d of %d: %w", n, b.o.cuts, err)
		}
		fmt.Printf("cut %d of %d: %s; %d checkpoints were ready\n", n, b.o.cuts, said, len(w.ready))
		if m, err = b.up(ctx); err != nil {
			return fmt.Errorf("after cut %d of %d: %w", n, b.o.cuts, err)
		}
		well = b.tests(ctx, m, "TestAfterCut", "READY="+strings.Join(w.ready, "\n"))
	}
	return nil
}

// up boots a machine on the disk.
func (b *machines) up(ctx context.Context) (*machine, error) {
	begun := time.Now()
	m, facts, err := boot(ctx, b.q, b.opts)
	if err == nil {
		b.result.facts = facts
		fmt.Fprintf(os.Stderr, "up after %.0f s\n", time.Since(begun).Seconds())
	}
	return m, err
}

// tests runs one test of the suite, and reports whether it passed.
func (b *machines) tests(ctx context.Context, m *machine, name string, env ...string) bool {
	begun := time.Now()
	part := m.runTests(ctx, b.suite, "^"+name+"$", env, b.o, b.kept)
	word := "passed"
	if !b.result.add(name, part) {
		word = "FAILED"
	}
	fmt.Printf("%s %s, %.0f s\n", name, word, time.Since(begun).Seconds())
	return word == "passed"
}

// reboot has a machine end itself in order, as for a reboot.
func (m *machine) reboot(ctx context.Context, bound time.Duration) error {
	if _, err := m.run(ctx, request{Args: []string{"systemctl", "--no-block", "reboot"}, Dir: "/", Seconds: 60},
		io.Discard); err != nil && alive(m) {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, bound, fmt.Errorf("the guest did not end within %v", bound))
	defer cancel()
	select {
	case <-m.ended:
		return nil
	case <-ctx.Done():
		return m.why(context.Cause(ctx))
	}
}

// cut lets a machine work, and takes its power away in the middle of a verb. It
// returns when that was.
func (b *machines) cut(ctx context.Context, m *machine, w *work, verb string) (string, error) {
	w.begin(verb)
	ended := make(chan error, 1)
	go func() {
		_, err := m.run(ctx, request{Args: []string{
			b.suite.binary(payload), "-test.run=^TestWork$",
		}, Env: environment(b.o),
			Dir: filepath.Join(payload, "src", b.suite.pkg), Seconds: int(b.o.timeout.Seconds())}, w)
		ended <- err
	}()
	select {
	case <-w.reached:
	case err := <-ended:
		return "", fmt.Errorf("the work ended by itself: %w\n%s", err, w.said.String())
	}
	into := time.Duration(rand.Int64N(int64(w.takes(verb))))
	select {
	case <-time.After(into):
	case err := <-ended:
		return "", fmt.Errorf("the work ended by itself: %w\n%s", err, w.said.String())
	}
	m.off()
	<-ended // with it, nothing more is heard
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failed != "" {
		return "", errors.New(w.failed)
	}
	return fmt.Sprintf("%.1f s into a %s, at work were %q", into.Seconds(), verb, w.now), nil
}

// work is what TestWork says of itself.
type work struct {
	mu      sync.Mutex
	said    bytes.Buffer
	line    []byte
	ready   []string // "ID MARK SANDBOX" of what has to be there, newest last
	now     map[string]string
	since   map[string]time.Time
	least   map[string]time.Duration // that a verb has taken
	await   string
	reached chan struct{} // closed when the verb that is awaited has begun
	failed  string
}

func newWork() *work { return &work{least: map[string]time.Duration{}} }

func (w *work) begin(verb string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.now, w.since, w.await, w.reached, w.line = map[string]string{}, map[string]time.Time{}, verb,
		make(chan struct{}), nil
	w.said.Reset()
}

// takes is how long a verb takes at least, as far as is known: a cut within that
// is one in the middle of it.
func (w *work) takes(verb string) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return max(w.least[verb], 500*time.Millisecond)
}

func (w *work) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.said.Write(p)
	w.line = append(w.line, p...)
	for {
		line, rest, whole := bytes.Cut(w.line, []byte("\n"))
		if !whole {
			return len(p), nil
		}
		w.line = rest
		if text, ok := strings.CutPrefix(string(line), "work: "); ok {
			w.take(strings.Fields(text), text)
		}
	}
}

func (w *work) take(f []string, text string) {
	switch {
	case f[0] == "begins" && len(f) == 3: // VERB SANDBOX
		verb, name := f[1], f[2]
		if was, ok := w.now[name]; ok {
			if took := time.Since(w.since[name]); w.least[was] == 0 || took < w.least[was] {
				w.least[was] = took
			}
		}
		w.now[name], w.since[name] = verb, time.Now()
		if verb == w.await && len(w.ready) > 0 {
			w.await = ""
			close(w.reached)
		}
	case f[0] == "ready" && len(f) == 4: // ID MARK SANDBOX
		w.ready = append(w.ready, strings.Join(f[1:], " "))
	case f[0] == "goes" && len(f) == 2: // ID
		for i, r := range w.ready {
			if strings.HasPrefix(r, f[1]+" ") {
				w.ready = append(w.ready[:i:i], w.ready[i+1:]...)
				break
			}
		}
	default:
		w.failed = text
		if w.await != "" {
			w.await = ""
			close(w.reached)
		}
	}
}

// overlay makes a disk in QEMU's format that holds what is written to it, above
// another one. QEMU keeps in memory where what was written lies, until the guest
// flushes: when QEMU is killed much of what was not flushed is gone, later writes
// sometimes before earlier ones, as with the cache of a real disk.
func overlay(path, below string) error {
	below, err := filepath.Abs(below)
	if err != nil {
		return err
	}
	info, err := os.Stat(below)
	if err != nil {
		return err
	}
	const bits, cluster = 16, 1 << 16
	const tables, counts, level1 = 1 * cluster, 2 * cluster, 3 * cluster // after the header
	entries := (info.Size() + cluster*cluster/8 - 1) / (cluster * cluster / 8)
	if entries > cluster/8 {
		return fmt.Errorf("%s is too large for this", below)
	}
	var head bytes.Buffer
	extension := []uint32{0xe2792aca, 3, 0x72617700, 0, 0, 0} // the format of what is below: "raw"; the end
	name := 104 + 4*len(extension)
	for _, field := range []any{[]byte("QFI\xfb"), uint32(3), uint64(name), uint32(len(below)), uint32(bits),
		uint64(info.Size()), uint32(0),
		uint32(entries), uint64(level1), uint64(tables), uint32(1), uint32(0), uint64(0), uint64(0), uint64(0),
		uint64(0), uint32(4), uint32(104), extension, []byte(below)} {
		if err := binary.Write(&head, binary.BigEndian, field); err != nil {
			return err
		}
	}
	image := make([]byte, 4*cluster)
	if copy(image[:cluster], head.Bytes()) < head.Len() {
		return fmt.Errorf("%s has too long a name", below)
	}
	binary.BigEndian.PutUint64(image[tables:], counts)
	for i := range 4 { // these clusters are used
		binary.BigEndian.PutUint16(image[counts+2*i:], 1)
	}
	return os.WriteFile(path, image, 0o600)
}
