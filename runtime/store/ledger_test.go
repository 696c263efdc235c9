package store

import (
	"bytes"
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// weighed makes a checkpoint of what the store has, with the ledger that is there and
// without one.
func weighed(t *testing.T, s *Store, c Checkpoint, data content) (with, without int64) {
	t.Helper()
	with = taken(t, s, c, data).Bytes
	must(t, s.dropLedgers())
	return with, taken(t, s, c, data).Bytes
}

// What a ledger says is what the index says, and one that is hurt says nothing.
func TestLedger(t *testing.T) {
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data := sample(1, 300_000)
	c := of(b, "", KindFull)
	c.Created = time.Unix(1e9, 1) // as long in every manifest
	path := s.ledgerPath(b.ID)
	taken(t, s, c, data)
	taken(t, s, c, data)
	good, err := os.ReadFile(path)
	must(t, err)
	if n := (len(good) - len(ledgerMagic) - ledgerSum) / ledgerRecord; n < 5 {
		t.Fatalf("a ledger of %d pieces", n)
	}
	if with, without := weighed(t, s, c, data); with != without {
		t.Errorf("%d bytes with a ledger, %d without", with, without)
	}
	want := taken(t, s, c, data).Bytes
	for at := 0; at < len(good); at += 37 {
		bad := bytes.Clone(good)
		bad[at] ^= 1
		for what, b := range map[string][]byte{"flipped": bad, "cut": good[:at]} {
			must(t, os.WriteFile(path, b, 0o600))
			if got := taken(t, s, c, data); got.Bytes != want {
				t.Errorf("%s at %d: %d bytes, not %d", what, at, got.Bytes, want)
			}
		}
	}
}

// What left the index is not counted on, whoever had it in a ledger.
func TestLedgerAfterReclaim(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data, c := sample(1, 300_000), of(b, "", KindFiles)
	gone := []Checkpoint{taken(t, s, c, data), taken(t, s, c, data)}
	r, err := s.OpenCheckpoint(ctx, gone[1].ID)
	must(t, err)
	var list []overlay.Entry
	must(t, r.entries(ctx, 0, func(e overlay.Entry) error { list = append(list, e); return nil }))
	must(t, r.Close())
	for _, c := range gone {
		must(t, s.RemoveCheckpoint(ctx, c.ID))
	}
	if _, _, err = treeOf(ctx, s, b, list); err != nil { // all is still there
		t.Fatal(err)
	}
	rows, err := s.Checkpoints(ctx, Filter{})
	must(t, err)
	must(t, s.RemoveCheckpoint(ctx, rows[0].ID))
	_, err = s.Reclaim(ctx, ReclaimOptions{})
	must(t, err)
	if _, _, err = treeOf(ctx, s, b, list); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("pieces that are gone: %v", err)
	}
}

// A piece that is known to be damaged is not counted on, although checkpoints
// that nobody has looked at since have it, and a ledger. Given anew, it heals them.
func TestDamagedIsNotCountedOn(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data, c := sample(1, 300_000), of(b, "", KindFiles)
	one, two := taken(t, s, c, data), taken(t, s, c, data)
	r, err := s.OpenCheckpoint(ctx, two.ID)
	must(t, err)
	var list []overlay.Entry
	digest := ""
	must(t, r.entries(ctx, 0, func(e overlay.Entry) error {
		if list = append(list, e); dataBytes(&e) > 0 && e.Pieces == nil {
			digest = e.Digest
		}
		return nil
	}))
	must(t, r.Close())
	id, err := pack.ParseID(digest)
	must(t, err)
	at, _, err := s.locate(ctx, id)
	must(t, err)
	row, err := s.packRow(ctx, at.pack)
	must(t, err)
	flip(t, pack.Path(s.packsDir(), row.name), at.blob.Off)

	if rep := must1(s.VerifyAll(ctx, VerifyOptions{IDs: []string{one.ID}, ReadData: true})); len(rep.Damaged) != 1 {
		t.Fatalf("verify: %+v", rep)
	}
	if _, _, err := treeOf(ctx, s, b, list); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("a checkpoint of what is damaged: %v", err)
	}
	d, err := s.BeginCheckpoint(ctx, c)
	must(t, err)
	if missing, err := d.Missing(ctx, []string{digest}); err != nil || len(missing) != 1 {
		t.Errorf("a pull would fetch %v, %v", missing, err)
	}
	must(t, d.Abort(ctx, nil))
	taken(t, s, c, data)
	if rep := must1(s.VerifyAll(ctx, VerifyOptions{ReadData: true})); len(rep.Damaged) > 0 {
		t.Errorf("still damaged: %+v", rep.Damaged)
	}
}
