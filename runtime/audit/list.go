package audit

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/fsx"
)

// Entry is one verb, begun and perhaps ended: the documented JSON of
// `agentbox audit ls`; it only ever grows.
type Entry struct {
	Record
	Prev     string    `json:"prev,omitempty"`  // of the records alone
	Phase    string    `json:"phase,omitempty"` // likewise
	Ended    time.Time `json:"ended,omitzero"`
	EndSeq   uint64    `json:"end_seq,omitempty"`
	UndoneBy uint64    `json:"undone_by,omitempty"` // the restore that has undone it, and was not undone itself
}

// Unfinished is the outcome of a verb that has not ended: under way, or killed.
const Unfinished = "unfinished"

// Filter selects entries; the zero value selects all.
type Filter struct {
	Since   time.Time
	Sandbox string // its name, its id or the beginning of that
	Verb    string
	Outcome string
}

// List returns what was done, oldest first.
func (l *Log) List(ctx context.Context, f Filter) ([]Entry, error) {
	names, err := l.segments()
	if err != nil {
		return nil, err
	}
	var all []*Entry
	open := map[uint64]*Entry{}
	for i, name := range names {
		// The next one's first record is younger than all of this one.
		if i+1 < len(names) && !f.Since.IsZero() {
			first, err := firstOf(filepath.Join(l.dir, names[i+1]))
			if err != nil {
				return nil, err
			}
			if first.Time.Before(f.Since.Add(-lockWait)) {
				continue
			}
		}
		err := eachLine(ctx, filepath.Join(l.dir, name), func(line []byte, whole bool) error {
			r, _, err := unseal(line)
			switch {
			case err != nil || !whole:
				return nil // verify reports it
			case r.Phase != End:
				e := &Entry{Record: r}
				if r.Phase == Begin {
					e.Outcome = Unfinished
					open[r.Seq] = e
				}
				all = append(all, e)
			case open[r.Of] != nil:
				e, begin := open[r.Of], open[r.Of].Record
				e.Record = r
				e.Seq, e.Time, e.Of, e.Phase = begin.Seq, begin.Time, 0, begin.Phase
				e.EndSeq, e.Ended = r.Seq, r.Time
				delete(open, r.Of)
			}
			return nil
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // pruned meanwhile
			return nil, err
		}
	}
	mark(all)
	out := []Entry{}
	for _, e := range all {
		if f.selects(*e) {
			out = append(out, *e)
		}
	}
	return out, nil
}

func (f Filter) selects(e Entry) bool {
	is := func(id string) bool { return len(f.Sandbox) >= 4 && strings.HasPrefix(id, f.Sandbox) }
	of := f.Sandbox == "" || e.Name == f.Sandbox || is(e.Sandbox) || slices.ContainsFunc(e.Made, is)
	return of && !e.Time.Before(f.Since) && (f.Verb == "" || e.Verb == f.Verb) &&
		(f.Outcome == "" || e.Outcome == f.Outcome)
}

// inside are the verbs whose effect is in the sandbox, where a restore undoes it.
var inside = map[string]bool{
	"attach": true, "cp": true, "exec": true, "files": true, "kill": true, "pause": true, "restart": true,
	"redo": true, "restore": true, "start": true, "stop": true, "undo": true, "unpause": true,
}

// mark records in each entry which restore has undone it. A restore that was undone itself
// has undone nothing.
func mark(all []*Entry) {
	restores := map[string][]*Entry{} // by sandbox, the newest first
	for _, e := range slices.Backward(all) {
		if e.Sandbox == "" || !inside[e.Verb] {
			continue
		}
		for _, r := range restores[e.Sandbox] {
			// A verb that had not ended by then was not undone with it.
			if r.Undid.From <= cmp.Or(e.EndSeq, e.Seq) && e.Seq <= r.Undid.To && r.UndoneBy == 0 {
				e.UndoneBy = r.Seq
				break
			}
		}
		if e.Undid != nil { // also where only its host files could not be put back
			restores[e.Sandbox] = append(restores[e.Sandbox], e)
		}
	}
}

// firstOf is the first record of a segment.
func firstOf(path string) (Record, error) {
	f, err := os.Open(path)
	if err != nil {
		return Record{}, err
	}
	defer f.Close()
	buf := make([]byte, maxLine)
	n, _ := f.Read(buf)
	line, _, ok := bytes.Cut(buf[:n], []byte("\n"))
	if !ok {
		return Record{}, nil // its first record is on its way
	}
	r, _, err := unseal(line)
	return r, err
}

// undone finds what a restore undoes: what was done to the sandbox from the checkpoint on, up
// to the record before. A checkpoint without a record (another verb took it) is found by its
// time.
func (l *Log) undone(sandbox, checkpoint string, taken time.Time, before uint64) (*Range, error) {
	names, err := l.segments()
	if err != nil {
		return nil, err
	}
	from := before
	mine := fmt.Appendf(nil, `"sandbox":"%s"`, sandbox)
	for _, name := range slices.Backward(names) {
		more, err := backward(filepath.Join(l.dir, name), func(line []byte) bool {
			if !bytes.Contains(line, mine) {
				return true
			}
			r, _, err := unseal(line)
			if err != nil || r.Sandbox != sandbox || r.Seq >= before {
				return true
			}
			switch {
			case r.Phase == End && r.Undo == checkpoint: // a restore
				from = r.Seq // what it did is undone, too
				return false
			case r.Phase == End && r.Outcome == "ok" && r.Verb == "checkpoint" &&
				r.Checkpoint == checkpoint || r.Time.Before(taken):
				return false
			}
			from = r.Seq
			return true
		})
		if err != nil {
			return nil, err
		}
		if first, err := firstOf(filepath.Join(l.dir, name)); !more || err == nil && first.Time.Before(taken) {
			break
		}
	}
	if from == before {
		return nil, nil
	}
	return &Range{From: from, To: before - 1}, nil
}

// Prune removes the segments all of whose records are older, but never the newest. It
// records what it removes.
func (l *Log) Prune(who Who, older time.Time) (gone *Range, err error) {
	names, err := l.segments()
	if err != nil {
		return nil, err
	}
	var drop []string
	for i := 0; i+1 < len(names); i++ {
		next, err := firstOf(filepath.Join(l.dir, names[i+1]))
		if err != nil {
			return nil, err
		}
		if !next.Time.Before(older) {
			break
		}
		drop = append(drop, names[i])
	}
	if len(drop) == 0 {
		return nil, nil
	}
	from, _ := segmentSeq(drop[0])
	next, _ := segmentSeq(names[len(drop)])
	gone = &Range{From: from, To: next - 1}
	// First the record: it shows that the removal was requested.
	if _, err := l.Append(Record{Phase: Note, Verb: "audit prune", Who: who, Dropped: gone}, true); err != nil {
		return nil, err
	}
	for _, name := range drop {
		if err := os.Remove(filepath.Join(l.dir, name)); err != nil {
			return nil, err
		}
	}
	return gone, fsx.SyncDir(l.dir)
}
