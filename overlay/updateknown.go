package overlay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/zeebo/blake3"
)

// Most often a directory is made again what it was when it was looked at last. Then
// what is known of it is also what is wanted, and needs no other list than that:
//
//	ProveKnown and PlanUpdateKnown, side by side -> Stage -> Apply -> CheckKnown -> Learnt.Write

// PlanUpdateKnown is a Collect of dir and PlanUpdate in one, for when the memory known
// of dir holds the very tree that is wanted, as ProveKnown tells. What known says is
// believed. sink is as in Collect. When known cannot be used it fails; a Collect
// and PlanUpdateTree need no memory.
func PlanUpdateKnown(ctx context.Context, dir, known string, sink Sink) (*Update, error) {
	return planBy(ctx, known, func(p *planner) error {
		k := &knownPlan{p: p, again: map[string]bool{}}
		if _, err := collect(ctx, dir, "", sink, CollectOptions{Known: known, Trust: true, plan: k}); err != nil {
			return fmt.Errorf("collect %s: %w", dir, err)
		}
		p.u.known, p.u.again = true, k.again
		return nil
	})
}

// knownPlan is told, in order, what a Collect finds beside the records of a memory
// that has what is wanted.
type knownPlan struct {
	p     *planner
	again map[string]bool // see Update
}

// passed takes a stretch in which all is as it was.
func (k *knownPlan) passed(b *stretch) error {
	for i := range b.items {
		if it := &b.items[i]; it.isDir {
			if err := k.same(b.record(it)); err != nil {
				return err
			}
		}
	}
	return nil
}

// same takes an entry that is as it was. The planner needs to know of directories and of
// inodes with several names.
func (k *knownPlan) same(rec memoryRecord) error {
	if !rec.key().isDir() && rec.key().links() < 2 {
		return nil
	}
	e, err := rec.entry()
	if err != nil {
		return fmt.Errorf("%w: %w", errKnown, err)
	}
	return k.add(&e, &e)
}

// pair takes an entry that is not as its record says, has no record, or is gone.
func (k *knownPlan) pair(rec memoryRecord, e *Entry) error {
	if rec == nil || rec.flags()&flagHole != 0 {
		return k.add(e, nil)
	}
	w, err := rec.entry()
	if err != nil {
		return fmt.Errorf("%w: %w", errKnown, err)
	}
	if e != nil && k.again != nil {
		parent, _ := splitPath(e.Path)
		if k.again[parent] = true; len(k.again) > checkAtMost {
			k.again = nil
		}
	}
	return k.add(e, &w)
}

func (k *knownPlan) add(have, want *Entry) error {
	p := k.p
	for _, side := range []struct {
		e     *Entry
		order *orderCheck
	}{{have, &p.haveOrder}, {want, &p.wantOrder}} {
		side.order.any = side.order.any || side.e != nil
	}
	return p.pair(have, want)
}

// CheckKnown is Check of an update that PlanUpdateKnown planned with known. The caller knows that
// only Apply could write to dir since. CheckKnown writes nothing: what it learns can be written
// later. Nil means that it cannot tell.
func (u *Update) CheckKnown(ctx context.Context, dir, known string, sink Sink) (*Learnt, error) {
	w, err := u.witness(false)
	if w == nil || err != nil || !u.known || u.again == nil {
		return nil, err
	}
	for path := range u.again {
		w.near[path] = true
	}
	// The update leads back to what is known, entry by entry.
	clear(w.left)
	_, err = collect(ctx, dir, "", sink, CollectOptions{Known: known, Trust: true, witness: w})
	if errors.Is(err, errKnown) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("check %s: %w", dir, err)
	}
	if w.wrong {
		return nil, nil
	}
	return &Learnt{known, w.keys}, nil
}

// Learnt is by what a memory, of which every entry is true again, knows the inodes
// that have become others.
type Learnt struct {
	known string
	keys  []keyChange
}

// keyChange is the part of a record, from its flags to the end of its key, that is
// not as it was, and where that is in the memory.
type keyChange struct {
	at  int64
	now [72 - 4]byte
}

// relearn takes a record that is written in place of another.
func (w *witness) relearn(at int64, rec memoryRecord) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.keys = append(w.keys, keyChange{at + 4, [72 - 4]byte(rec[4:72])})
}

// Write writes l to the memory in place, and gives the memory another base. A process killed in
// the middle leaves a memory that is not used, because nothing in it is proven.
func (l *Learnt) Write(base string) error {
	m, err := openMemory(l.known)
	if err != nil {
		return err
	}
	defer m.close()
	f, err := os.OpenFile(l.known, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("memory: %w", err)
	}
	for i := range l.keys {
		if _, err := f.WriteAt(l.keys[i].now[:], l.keys[i].at); err != nil {
			return errors.Join(fmt.Errorf("memory: %w", err), f.Close())
		}
	}
	h := blake3.New()
	if _, err := io.CopyBuffer(h, io.NewSectionReader(m.f, 0, m.end), make([]byte, memoryBuffer)); err != nil {
		return errors.Join(fmt.Errorf("memory: %w", err), f.Close())
	}
	m.base, m.sum = base, [32]byte(h.Sum(nil))
	end := m.trailer.append(nil)
	_, err = f.WriteAt(end, m.end)
	if err == nil {
		err = f.Truncate(m.end + int64(len(end)))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("memory: %w", err)
	}
	return nil
}
