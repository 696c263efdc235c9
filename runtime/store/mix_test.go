package store

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

// mix drafts, reads, removes and sweeps in a store that others use the same way.
func mix(ctx context.Context, root string, args []string) error {
	s, err := Open(ctx, root)
	if err != nil {
		return err
	}
	defer s.Close()
	seed, _ := strconv.ParseUint(args[0], 10, 64)
	rounds, _ := strconv.Atoi(args[1]) // 0: until killed
	r := rand.New(rand.NewPCG(seed, 2))
	b := sandbox(fmt.Sprint("mix", seed))
	l, err := s.Lock(ctx, b.ID, "mix", 0)
	if err != nil {
		return err
	}
	defer l.Unlock()
	if err := s.PutSandbox(ctx, b); err != nil {
		return err
	}
	fmt.Println("begun")
	head := ""
	for i := 0; rounds == 0 || i < rounds; i++ {
		// All of them choose from the same few contents, so that they need each
		// other's chunks.
		n := r.Uint64N(4)
		c := of(b, "", KindFull)
		c.Labels = map[string]string{"content": fmt.Sprint(n)}
		c.Parent = head
		done, err := take(ctx, s, c, sample(n, 30_000))
		if err != nil {
			return err
		}
		head = done.ID
		list, err := s.Checkpoints(ctx, Filter{})
		if err != nil {
			return err
		}
		pick := list[r.IntN(len(list))]
		if err := s.readBack(ctx, pick); err != nil {
			return fmt.Errorf("checkpoint %s: %w", pick.ID, err)
		}
		if r.IntN(2) == 0 {
			list, err := s.Checkpoints(ctx, Filter{SandboxID: b.ID})
			if err != nil {
				return err
			}
			if err := s.RemoveCheckpoint(ctx, list[r.IntN(len(list))].ID); err != nil {
				return err
			}
		}
		if _, err := s.Sweep(ctx); err != nil {
			return err
		}
	}
	return nil
}

// readBack wants a checkpoint of mix to hold what it says, or to be removed.
func (s *Store) readBack(ctx context.Context, c Checkpoint) error {
	rd, err := s.OpenCheckpoint(ctx, c.ID)
	if errors.Is(err, fault.ErrNotFound) || errors.Is(err, fault.ErrState) {
		return nil
	}
	if err != nil {
		return err
	}
	defer rd.Close()
	n, _ := strconv.ParseUint(rd.Manifest().Labels["content"], 10, 64)
	want := sample(n, 30_000)
	got, err := filesOf(ctx, rd, 0)
	if err != nil {
		return err
	}
	if !equalFiles(got, want.files) {
		return errors.New("its files are others")
	}
	for name, data := range want.images {
		f, err := rd.Image(ctx, name)
		if err != nil {
			return err
		}
		back, err := io.ReadAll(f)
		if err := errors.Join(err, f.Close()); err != nil || string(back) != string(data) {
			return fmt.Errorf("image %s differs (%v)", name, err)
		}
	}
	return nil
}

// Several processes draft, read, remove and sweep at once, and some are killed. No reader
// ever sees anything but what was written.
func TestProcessesSideBySide(t *testing.T) {
	ctx := context.Background()
	root := t.TempDir()
	s := open(t, root)
	for round := range 3 {
		var wg sync.WaitGroup
		for p := range 5 {
			rounds := 8
			if p < 2 {
				rounds = 0
			}
			cmd := helper(t, "mix", root, fmt.Sprint(10*round+p), fmt.Sprint(rounds))
			out, err := cmd.StdoutPipe()
			must(t, err)
			must(t, cmd.Start())
			wg.Go(func() {
				if rounds > 0 {
					_, _ = io.Copy(io.Discard, out)
					if err := cmd.Wait(); err != nil {
						t.Error(err)
					}
					return
				}
				if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
					t.Error("ended by itself:", err)
				}
				time.Sleep(time.Duration(rand.IntN(200)) * time.Millisecond)
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
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
		list, err := s.Checkpoints(ctx, Filter{})
		must(t, err)
		for _, c := range list {
			must(t, s.readBack(ctx, c))
		}
	}
}
