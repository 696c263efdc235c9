package audit

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/fsx"
)

const (
	// maxSegment is the size of a segment, in bytes. That much is reserved for it when it
	// begins, so that a full disk does not end it.
	maxSegment = 1 << 20
	// maxLine bounds a record.
	maxLine = 32 << 10
	// lockWait is how long to wait for other processes that append, which takes them
	// microseconds unless they were stopped.
	lockWait = 10 * time.Second
)

// genesis is the hash before the first record.
var genesis = strings.Repeat("0", 2*sha256.Size)

// Phases of records.
const (
	Begin = "begin" // of a verb
	End   = "end"   // of a verb
	Note  = "note"  // of what is no verb of the service
)

// Who is the origin of a verb.
type Who struct {
	UID *uint32 `json:"uid,omitempty"`
	Pid int     `json:"pid,omitempty"`
	// the user of the login session, even after su or sudo; the kernel's loginuid
	Login *uint32 `json:"login,omitempty"`
	// For a caller on another host: the subject of its certificate, and its address.
	Client  string `json:"client,omitempty"`
	Address string `json:"address,omitempty"`
	By      string `json:"by"` // "command", "service", or which process or part of agentbox itself
}

// Range is a range of sequence numbers, both included.
type Range struct {
	From uint64 `json:"from"`
	To   uint64 `json:"to"`
}

// Record is one line of the log; it only ever grows.
type Record struct {
	Seq   uint64    `json:"seq"`
	Prev  string    `json:"prev"`
	Time  time.Time `json:"time"`
	Phase string    `json:"phase"`
	Of    uint64    `json:"of,omitempty"` // end: the number of the begin
	Verb  string    `json:"verb"`
	Who   Who       `json:"who"`

	Ref        string `json:"ref,omitempty"`     // the sandbox, checkpoint or image, as the caller named it
	Sandbox    string `json:"sandbox,omitempty"` // its id
	Name       string `json:"name,omitempty"`    // the sandbox's
	Checkpoint string `json:"checkpoint,omitempty"`
	To         string `json:"to,omitempty"` // push, tag, commit: the reference or the name

	Program string `json:"program,omitempty"` // exec: without its arguments, which may be secrets
	Exit    *int   `json:"exit,omitempty"`    // exec
	Signal  string `json:"signal,omitempty"`  // kill
	// fork: ids of sandboxes; prune: of the checkpoints that are gone; recover: of the sandboxes it found
	Made []string `json:"made,omitempty"`
	Undo string   `json:"undo,omitempty"` // restore: the checkpoint of what it has replaced
	// checkpoint: host files that belong to it; restore: those that it has put back, or removed
	Attached []string `json:"attached,omitempty"`
	Effects  []string `json:"effects,omitempty"` // restore: ids of the effects it compensated, and the outcome
	Undid    *Range   `json:"undid,omitempty"`   // restore: what was done to the sandbox by these is undone
	Outcome  string   `json:"outcome,omitempty"` // end: "ok", or the code of the error
	Text     []string `json:"text,omitempty"`    // recover: what it did; apply: its risk, and what it had to pass
	Why      string   `json:"why,omitempty"`     // of what agentbox does by itself: the lease, the limit, the policy

	Torn    int    `json:"torn,omitempty"`    // bytes of a record before this one that a crash has cut short
	Dropped *Range `json:"dropped,omitempty"` // audit prune: these were removed on request

	Hash string `json:"-"` // at the end of the line
}

const hashMark = `,"hash":"`

// seal returns the line of a record, and its hash.
func seal(r Record) (line []byte, hash string, err error) {
	body, err := json.Marshal(r)
	if err != nil {
		return nil, "", err
	}
	body = body[:len(body)-1]
	sum := sha256.Sum256(body)
	hash = hex.EncodeToString(sum[:])
	line = append(body, hashMark+hash+"\"}\n"...)
	if len(line) > maxLine {
		return nil, "", fmt.Errorf("%w: a record of %d bytes", fault.ErrInvalid, len(line))
	}
	return line, hash, nil
}

// unseal reads a line, without its newline. whole: its hash is that of what it says.
func unseal(line []byte) (r Record, whole bool, err error) {
	at := len(line) - len(hashMark) - len(genesis) - len(`"}`)
	if at < 1 || string(line[at:at+len(hashMark)]) != hashMark || !bytes.HasSuffix(line, []byte(`"}`)) {
		return r, false, fmt.Errorf("no record: %w", fault.ErrCorrupt)
	}
	if err := json.Unmarshal(append(slices.Clone(line[:at]), '}'), &r); err != nil {
		return r, false, fmt.Errorf("no record: %w: %v", fault.ErrCorrupt, err)
	}
	r.Hash = string(line[at+len(hashMark) : len(line)-len(`"}`)])
	sum := sha256.Sum256(line[:at])
	return r, r.Hash == hex.EncodeToString(sum[:]), nil
}

// A Log is the log below one root.
type Log struct{ dir string }

// Open returns the log of a root. It makes nothing before the first record.
func Open(root string) *Log { return &Log{filepath.Join(root, "audit")} }

// Dir returns the directory of the log.
func (l *Log) Dir() string { return l.dir }

// Append adds a record and fills in its number, time and hashes. A durable record is on the
// disk when Append returns, with all before it.
func (l *Log) Append(r Record, durable bool) (seq uint64, err error) {
	unlock, err := l.lock()
	if err != nil {
		return 0, err
	}
	f, at, err := l.appendTo(&r)
	unlock()
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if err := failpoint.Hit("audit.after-append"); err != nil {
		return 0, err
	}
	if !durable {
		return at.seq, nil
	}
	// Not under the lock: concurrent callers share one wait for the disk.
	if err := unix.Fdatasync(int(f.Fd())); err != nil {
		return 0, fmt.Errorf("%s: %w", f.Name(), err)
	}
	if err := failpoint.Hit("audit.after-sync"); err != nil {
		return 0, err
	}
	return at.seq, l.advance(at)
}

// A place is one record's in the chain.
type place struct {
	seq  uint64
	hash string
}

// appendTo writes a record at the end, and returns its segment.
func (l *Log) appendTo(r *Record) (f *os.File, at place, err error) {
	names, err := l.segments()
	if err != nil {
		return nil, at, err
	}
	last, size, torn := place{0, genesis}, int64(0), 0
	for i := len(names) - 1; i >= 0; i-- {
		var path = filepath.Join(l.dir, names[i])
		var end place
		n, cut := int64(0), 0
		if end, n, cut, err = tail(path); err != nil {
			return nil, at, &fault.Error{Err: fmt.Errorf("%s: %w", path, err),
				Hint: "Look with: agentbox audit verify. To begin a new log, move " + l.dir + " and " +
					l.anchorPath() + " elsewhere."}
		}
		torn += cut
		if i == len(names)-1 {
			size = n
		}
		if end.seq > 0 {
			last = end
			break
		}
		// Nothing but the beginning of a record: the segment before it goes on.
	}
	// A lost record that was on the disk leaves a gap, which verify finds ever after.
	for _, known := range []func() (place, error){l.head, l.anchor} {
		if at, err := known(); err == nil && at.seq > last.seq {
			last = at
		}
	}
	r.Seq, r.Prev, r.Time, r.Torn = last.seq+1, last.hash, time.Now().UTC(), torn
	line, hash, err := seal(*r)
	if err != nil {
		return nil, at, err
	}
	name := segmentName(r.Seq)
	if len(names) > 0 && (size == 0 || size+int64(len(line)) <= maxSegment) {
		name = names[len(names)-1]
	} else {
		if len(names) > 0 {
			if err := finish(filepath.Join(l.dir, names[len(names)-1]), size); err != nil {
				return nil, at, err
			}
		}
		size = 0
	}
	path := filepath.Join(l.dir, name)
	f, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, at, err
	}
	if torn > 0 {
		err = f.Truncate(size)
	}
	if err == nil && size == 0 {
		// Where a filesystem cannot do it, there is no room set aside.
		_ = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, maxSegment)
		err = fsx.SyncDir(l.dir)
	}
	if err == nil {
		if _, err = f.WriteAt(line, size); err != nil {
			err = errors.Join(err, f.Truncate(size)) // what is cut short is no record
		}
	}
	if err != nil {
		return nil, at, errors.Join(err, f.Close())
	}
	return f, place{r.Seq, hash}, nil
}

// finish ends a segment after its last record and makes it durable: what comes after it
// is in another file, and must not outlast it.
func finish(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(size), f.Sync(), f.Close())
}

// tail finds the last record of a segment; seq 0: it has none. size is where it
// ends, torn what is behind it.
func tail(path string) (last place, size int64, torn int, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return last, 0, 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return last, 0, 0, err
	}
	from := max(0, info.Size()-2*maxLine)
	buf := make([]byte, info.Size()-from)
	if _, err := f.ReadAt(buf, from); err != nil {
		return last, 0, 0, err
	}
	end := bytes.LastIndexByte(buf, '\n')
	torn = len(buf) - end - 1
	size = info.Size() - int64(torn)
	if end < 0 && from > 0 {
		return last, 0, 0, fmt.Errorf("the last record: %w", fault.ErrCorrupt)
	}
	if end < 0 {
		return last, 0, torn, nil
	}
	r, _, err := unseal(buf[bytes.LastIndexByte(buf[:end], '\n')+1 : end])
	return place{r.Seq, r.Hash}, size, torn, err
}

// segmentName is that of the segment that begins with a record.
func segmentName(seq uint64) string { return fmt.Sprintf("%020d.jsonl", seq) }

func segmentSeq(name string) (uint64, bool) {
	digits, ok := strings.CutSuffix(name, ".jsonl")
	seq, err := strconv.ParseUint(digits, 10, 64)
	return seq, ok && err == nil && len(digits) == 20
}

// segments lists them, the oldest first.
func (l *Log) segments() ([]string, error) {
	list, err := os.ReadDir(l.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var names []string
	for _, e := range list {
		if _, ok := segmentSeq(e.Name()); ok {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// lock keeps others from appending. It makes the log where there is none.
func (l *Log) lock() (unlock func(), err error) {
	path := filepath.Join(l.dir, "lock")
	ctx, cancel := context.WithTimeout(context.Background(), lockWait)
	defer cancel()
	h, err := flock.Lock(ctx, path, flock.Existing)
	if errors.Is(err, fs.ErrNotExist) {
		if err = l.begin(); err == nil {
			h, err = flock.Lock(ctx, path, 0)
		}
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return nil, fmt.Errorf("%w: another process has been writing to %s for %v", fault.ErrBusy, l.dir, lockWait)
	case err != nil:
		return nil, err
	}
	return h.Unlock, nil
}

// begin makes an empty log, its head first: that it is missing means something.
func (l *Log) begin() error {
	if err := os.MkdirAll(l.dir, 0o700); err != nil {
		return err
	}
	// Under another name until it is whole: one that is cut short is damage, to verify. By a
	// link, which unlike fsx replaces none that another process has made meanwhile.
	head, err := os.CreateTemp(l.dir, ".head-")
	if err != nil {
		return err
	}
	defer os.Remove(head.Name())
	_, err = head.WriteString(headText(place{0, genesis}))
	if err = errors.Join(err, head.Sync(), head.Close()); err != nil {
		return err
	}
	if err := os.Link(head.Name(), filepath.Join(l.dir, "head")); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return errors.Join(fsx.SyncDir(l.dir), fsx.SyncDir(filepath.Dir(l.dir)))
}
