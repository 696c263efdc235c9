package store

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// churn puts sandboxes, checkpoints and intents without end, and prints each
// one once the store has said that it is durable.
func churn(ctx context.Context, root string, args []string) error {
	s, err := Open(ctx, root)
	if err != nil {
		return err
	}
	defer s.Close()
	seed, _ := strconv.ParseUint(args[0], 10, 64)
	limit, _ := strconv.Atoi(args[1]) // 0: until killed
	for i := uint64(0); limit == 0 || i < uint64(limit); i++ {
		b := sandbox(fmt.Sprintf("s%d-%d", seed, i))
		l, err := s.Lock(ctx, b.ID, "churn", 0)
		if err != nil {
			return err
		}
		if err := s.PutSandbox(ctx, b); err != nil {
			return err
		}
		fmt.Println("sandbox", b.ID)
		seq, err := s.Begin(ctx, Intent{Op: "churn", Sandbox: b.ID})
		if err != nil {
			return err
		}
		fmt.Println("intent", seq)
		c, err := take(ctx, s, of(b, "n", KindFull), sample(seed+i, 2000))
		if err != nil {
			return err
		}
		fmt.Println("checkpoint", c.ID)
		if i%3 == 2 {
			fmt.Println("removing", c.ID)
			if err := s.RemoveCheckpoint(ctx, c.ID); err != nil {
				return err
			}
		}
		fmt.Println("ending", seq)
		if err := s.Done(ctx, seq); err != nil {
			return err
		}
		fmt.Println("ended", seq)
		l.Unlock()
	}
	return nil
}

// said is what a churn was told is durable.
type said struct{ sandboxes, checkpoints, removing, intents, ending, ended map[string]bool }

func (x *said) read(r io.Reader) {
	sets := map[string]map[string]bool{
		"sandbox": x.sandboxes, "checkpoint": x.checkpoints, "removing": x.removing, "intent": x.intents,
		"ending": x.ending, "ended": x.ended,
	}
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if kind, id, ok := strings.Cut(lines.Text(), " "); ok && sets[kind] != nil {
			sets[kind][id] = true
		}
	}
}

func newSaid() *said {
	m := func() map[string]bool { return map[string]bool{} }
	return &said{m(), m(), m(), m(), m(), m()}
}

// Four processes write to one store; some are killed in the middle, again and again. Acknowledged
// checkpoints are there, exactly, and nothing half-made is.
func TestProcessesKilledWhileWriting(t *testing.T) {
	ctx := context.Background()
	root := t.TempDir()
	s := open(t, root)
	all := newSaid()
	var mu sync.Mutex
	for round := range 5 {
		var wg sync.WaitGroup
		for p := range 4 {
			limit := 0
			if p < 2 {
				limit = 6 // two run to their end, two are killed
			}
			cmd := helper(t, "churn", root, fmt.Sprint(100*round+p), fmt.Sprint(limit))
			out, err := cmd.StdoutPipe()
			must(t, err)
			must(t, cmd.Start())
			wg.Go(func() {
				mine := newSaid()
				if limit == 0 {
					// Killed at a random line, which is a random step.
					r := bufio.NewReader(out)
					var lines strings.Builder
					for range 3 + rand.IntN(25) {
						line, err := r.ReadString('\n')
						lines.WriteString(line)
						if err != nil {
							t.Error("ended by itself:", err)
							break
						}
					}
					time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
					_ = cmd.Process.Kill()
					rest, _ := io.ReadAll(r)
					lines.Write(rest)
					mine.read(strings.NewReader(lines.String()))
					_ = cmd.Wait()
				} else {
					mine.read(out)
					if err := cmd.Wait(); err != nil {
						t.Error(err)
					}
				}
				mu.Lock()
				defer mu.Unlock()
				for _, x := range [][2]map[string]bool{
					{all.sandboxes, mine.sandboxes}, {all.checkpoints, mine.checkpoints}, {all.removing, mine.removing},
					{all.intents, mine.intents}, {all.ending, mine.ending}, {all.ended, mine.ended},
				} {
					for id := range x[1] {
						x[0][id] = true
					}
				}
			})
		}
		wg.Wait()
		if _, err := s.Sweep(ctx); err != nil {
			t.Fatal(err)
		}
		if again, err := s.Sweep(ctx); err != nil || len(again) > 0 {
			t.Fatalf("the second sweep had work: %v, %v", again, err)
		}
		tidy(t, s)
		intact(t, s)
	}

	killed := 10 // at most one unacknowledged action per killed process
	list, err := s.Sandboxes(ctx)
	must(t, err)
	have := map[string]bool{}
	for _, b := range list {
		have[b.ID] = true
	}
	exact(t, "sandbox", all.sandboxes, nil, have, killed)
	ready, err := s.Checkpoints(ctx, Filter{})
	must(t, err)
	have = map[string]bool{}
	for _, c := range ready {
		have[c.ID] = true
	}
	exact(t, "checkpoint", all.checkpoints, all.removing, have, killed)
	intents, err := s.Intents(ctx)
	must(t, err)
	have = map[string]bool{}
	for _, in := range intents {
		have[fmt.Sprint(in.Seq)] = true
	}
	exact(t, "intent", all.intents, all.ending, have, killed)
	for seq := range all.ended {
		if have[seq] {
			t.Errorf("intent %s was done and is back", seq)
		}
	}
}

// exact wants everything acknowledged and not being ended to be there, and at
// most a few more that died before they could be acknowledged.
func exact(t *testing.T, what string, acknowledged, ending, have map[string]bool, more int) {
	t.Helper()
	surplus := 0
	for id := range have {
		if !acknowledged[id] {
			surplus++
		}
	}
	for id := range acknowledged {
		if !have[id] && !ending[id] {
			t.Errorf("%s %s was acknowledged and is gone", what, id)
		}
	}
	if surplus > more {
		t.Errorf("%d %ss more than were acknowledged, at most %d were in flight", surplus, what, more)
	}
	t.Logf("%s: %d acknowledged, %d there, %d in flight", what, len(acknowledged), len(have), surplus)
}

// hold takes a lock, says so, and waits for its input to end. With a second
// argument it starts a child that inherits the lock, then exits by SIGKILL.
func hold(ctx context.Context, root string, args []string) error {
	s, err := Open(ctx, root)
	if err != nil {
		return err
	}
	defer s.Close()
	l, err := s.Lock(ctx, args[0], "checkpoint", 10*time.Second)
	if err != nil {
		return err
	}
	if len(args) > 1 {
		child := exec.Command("cat")
		child.Stdin, child.Stdout = os.Stdin, os.Stdout
		child.ExtraFiles = []*os.File{l.File()}
		if err := child.Start(); err != nil {
			return err
		}
		fmt.Println("held")
		return unix.Kill(os.Getpid(), unix.SIGKILL)
	}
	fmt.Println("held")
	_, err = io.Copy(io.Discard, os.Stdin)
	l.Unlock()
	return err
}

// holding starts a helper that holds a lock.
func holding(t *testing.T, root string, args ...string) (cmd *exec.Cmd, release io.Closer) {
	t.Helper()
	cmd = helper(t, "hold", root, args...)
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "held\n" {
		t.Fatalf("%q, %v", line, err)
	}
	return cmd, in
}

func TestLock(t *testing.T) {
	ctx := context.Background()
	root := t.TempDir()
	s := open(t, root)
	b := put(t, s, "box")
	cmd, release := holding(t, root, b.ID)

	_, err := s.Lock(ctx, b.ID, "restore", 0)
	wantErr(t, err, fault.ErrBusy, "sandbox box is busy: checkpoint by pid "+fmt.Sprint(cmd.Process.Pid)+" since ")
	start := time.Now()
	_, err = s.Lock(ctx, b.ID, "restore", 60*time.Millisecond)
	wantErr(t, err, fault.ErrBusy)
	if d := time.Since(start); d < 60*time.Millisecond || d > 5*time.Second {
		t.Errorf("waited %v", d)
	}
	short, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
	defer cancel()
	if _, err = s.Lock(short, b.ID, "restore", -1); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	other, err := s.Lock(ctx, NewID(), "restore", 0) // another sandbox is free
	must(t, err)
	other.Unlock()

	got := make(chan error, 1)
	go func() {
		l, err := s.Lock(ctx, b.ID, "restore", -1)
		if err == nil {
			defer l.Unlock()
		}
		got <- err
	}()
	must(t, release.Close())
	must(t, <-got)
	must(t, cmd.Wait())

	l, err := s.Lock(ctx, b.ID, "restore", 0)
	must(t, err)
	_, err = s.Lock(ctx, b.ID, "again", 0) // goroutines exclude each other, too
	wantErr(t, err, fault.ErrBusy, "restore by pid "+fmt.Sprint(os.Getpid()))
	l.Unlock()
	l.Unlock()

	for _, bad := range []string{"", "../x", ".open", "a/b"} {
		_, err := s.Lock(ctx, bad, "x", 0)
		wantErr(t, err, fault.ErrInvalid)
	}
	must(t, os.Symlink("/etc/passwd", filepath.Join(root, "locks", "planted")))
	_, err = s.Lock(ctx, "planted", "x", 0)
	wantErr(t, err, nil)
}

func TestLockHolderKilled(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	id := NewID()
	cmd, release := holding(t, root, id)
	defer release.Close()
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	l, err := s.Lock(context.Background(), id, "next", 0)
	must(t, err)
	l.Unlock()
}

func TestLockInherited(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	id := NewID()
	cmd, release := holding(t, root, id, "inherit")
	pid := cmd.Process.Pid
	_, _ = cmd.Process.Wait() // it killed itself; its child lives
	_, err := s.Lock(context.Background(), id, "next", 0)
	wantErr(t, err, fault.ErrBusy, fmt.Sprintf("checkpoint by a process that pid %d left behind", pid))
	must(t, release.Close()) // ends the child
	l, err := s.Lock(context.Background(), id, "next", 10*time.Second)
	must(t, err)
	l.Unlock()
	_ = cmd.Wait() // closes the pipes
}

// Unlocking while other goroutines start processes must free the lock at
// once: a half-started child must not be seen holding it.
func TestUnlockWhileForking(t *testing.T) {
	s := open(t, t.TempDir())
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					_ = exec.Command("/bin/true").Run()
				}
			}
		})
	}
	id := NewID()
	for range 300 {
		l, err := s.Lock(context.Background(), id, "x", 0)
		if err != nil {
			t.Error(err)
			break
		}
		l.Unlock()
	}
	close(stop)
	wg.Wait()
}

// Lock files of forgotten sandboxes are removed, but never while a process holds one.
func TestLockFilesSwept(t *testing.T) {
	ctx := context.Background()
	root := t.TempDir()
	s := open(t, root)
	b := put(t, s, "alive")
	long := time.Now().Add(-time.Hour)
	mk := func(id string) string {
		l, err := s.Lock(ctx, id, "x", 0)
		must(t, err)
		l.Unlock()
		path := filepath.Join(root, "locks", id)
		must(t, os.Chtimes(path, long, long))
		return path
	}
	alive, gone, fresh, named := mk(b.ID), mk(NewID()), mk(NewID()), mk("images")
	must(t, os.Chtimes(fresh, time.Now(), time.Now()))
	held := NewID()
	l, err := s.Lock(ctx, held, "x", 0)
	must(t, err)
	must(t, os.Chtimes(l.File().Name(), long, long))
	_, err = s.Sweep(ctx)
	must(t, err)
	for path, want := range map[string]bool{alive: true, gone: false, fresh: true, named: true, l.File().Name(): true} {
		if there := must1(exists(path)); there != want {
			t.Errorf("%s: there %v, want %v", path, there, want)
		}
	}
	l.Unlock()

	// Removal races with taking: two holders at once would show.
	id := NewID()
	var inside, wg = make(chan struct{}, 1), sync.WaitGroup{}
	for range 4 {
		wg.Go(func() {
			for range 100 {
				l, err := s.Lock(ctx, id, "x", -1)
				if err != nil {
					t.Error(err)
					return
				}
				select {
				case inside <- struct{}{}:
				default:
					t.Error("two hold one lock")
				}
				<-inside
				// A process that removes the file thereby gives up the lock: from then on the
				// next may hold it, by a new file.
				if rand.IntN(4) == 0 {
					_ = os.Remove(l.File().Name())
				}
				l.Unlock()
			}
		})
	}
	wg.Wait()
}

// The single steps that failpoint tests kill in the middle.

func fixture(ctx context.Context, root string) (*Store, Sandbox, error) {
	s, err := Open(ctx, root)
	if err != nil {
		return nil, Sandbox{}, err
	}
	b, err := s.Sandbox(ctx, "box")
	return s, b, err
}

func checkpointOnce(ctx context.Context, root string, _ []string) error {
	s, b, err := fixture(ctx, root)
	if err != nil {
		return err
	}
	defer s.Close()
	l, err := s.Lock(ctx, b.ID, "checkpoint", 0)
	if err != nil {
		return err
	}
	defer l.Unlock()
	_, err = take(ctx, s, of(b, "new", KindFull), sample(9, 3<<20))
	return err
}

func removeOnce(ctx context.Context, root string, args []string) error {
	s, _, err := fixture(ctx, root)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.RemoveCheckpoint(ctx, args[0])
}

func sweepOnce(ctx context.Context, root string, _ []string) error {
	s, _, err := fixture(ctx, root)
	if err != nil {
		return err
	}
	defer s.Close()
	_, err = s.Sweep(ctx)
	return err
}

func putOnce(ctx context.Context, root string, _ []string) error {
	s, _, err := fixture(ctx, root)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.PutSandbox(ctx, sandbox("other"))
}

func deleteOnce(ctx context.Context, root string, _ []string) error {
	s, b, err := fixture(ctx, root)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.DeleteSandbox(ctx, b.ID)
}

func journalOnce(ctx context.Context, root string, _ []string) error {
	s, b, err := fixture(ctx, root)
	if err != nil {
		return err
	}
	defer s.Close()
	seq, err := s.Begin(ctx, Intent{Op: "x", Sandbox: b.ID})
	if err != nil {
		return err
	}
	return s.Done(ctx, seq)
}

func abortOnce(ctx context.Context, root string, _ []string) error {
	s, b, err := fixture(ctx, root)
	if err != nil {
		return err
	}
	defer s.Close()
	d, err := s.BeginCheckpoint(ctx, of(b, "new", KindFull))
	if err != nil {
		return err
	}
	if err := fill(d, sample(9, 1000)); err != nil {
		return err
	}
	return d.Abort(ctx, errors.New("wanted"))
}
