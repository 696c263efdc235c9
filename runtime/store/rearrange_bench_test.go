package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/overlay"
)

func init() {
	roles["verify"] = func(ctx context.Context, root string, args []string) error {
		s, err := Open(ctx, root)
		if err != nil {
			return err
		}
		defer s.Close()
		_, err = s.VerifyAll(ctx, VerifyOptions{ReadData: args[0] == "data"})
		return errors.Join(err, sayMemory())
	}
	roles["usage"] = func(ctx context.Context, root string, _ []string) error {
		s, err := Open(ctx, root)
		if err != nil {
			return err
		}
		defer s.Close()
		_, err = s.Usage(ctx)
		return errors.Join(err, sayMemory())
	}
}

// sayMemory prints the peak memory of this process, in KiB. The peak that wait reports would
// include that of the parent, from the time before the exec.
func sayMemory() error {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	_, rest, _ := strings.Cut(string(b), "VmHWM:")
	_, err = fmt.Println(strings.Fields(rest)[0])
	return err
}

// BenchmarkWholeStore: what is done with all of a store, with a million chunks in
// it that two checkpoints need. The memory is that of the whole process.
func BenchmarkWholeStore(b *testing.B) {
	ctx := context.Background()
	root := b.TempDir()
	s := open(b, root)
	box := put(b, s, "box")
	const n = 1000000
	for round := range 2 {
		d, err := s.BeginCheckpoint(ctx, of(box, fmt.Sprint(round), KindFiles))
		must(b, err)
		sink := d.Sink()
		must(b, d.PutTree(ctx, 0, func(fn func(overlay.Entry) error) error {
			if err := fn(overlay.Entry{Path: ".", Type: overlay.TypeDir, Mode: 0o755}); err != nil {
				return err
			}
			var raw [24]byte
			for i := range n {
				binary.LittleEndian.PutUint64(raw[:], uint64(i))
				e := overlay.Entry{
					Path: fmt.Sprintf("f%07d", i), Type: overlay.TypeFile, Mode: 0o644, Size: int64(len(raw)),
				}
				if i == 500 {
					e.Mode += uint32(round)
				}
				var err error
				if e.Digest, e.Chunks, err = sink.Data(ctx, e.Size, bytes.NewReader(raw[:])); err != nil {
					return err
				}
				if err := fn(e); err != nil {
					return err
				}
			}
			return nil
		}))
		must1(d.Commit(ctx, describe()))
		must(b, d.Close())
	}
	for _, role := range [][]string{{"usage"}, {"verify", "lists"}, {"verify", "data"}, {"reclaim", "say"}} {
		b.Run(fmt.Sprint(role), func(b *testing.B) {
			for b.Loop() {
				cmd := helper(b, role[0], root, role[1:]...)
				out, err := cmd.Output()
				must(b, err)
				var kib float64
				_, err = fmt.Sscan(string(out), &kib)
				must(b, err)
				b.ReportMetric(kib/1024, "MiB")
			}
		})
	}
}
